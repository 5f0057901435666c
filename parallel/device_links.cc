#include "parallel/device_links.h"

#include "core/device.h"

namespace lockstep {

Status DeviceLinks::start(DeviceMessage& m, int peer, int tag, bool sending) {
  const auto [it, fresh] = links_.try_emplace({peer, tag, sending ? 1 : 0});
  Link& link = it->second;
  if (fresh) {
    link.peer = peer;
    link.tag = tag;
    link.sending = sending;
    LOCKSTEP_RETURN_IF_ERROR(make(link));
  }
  if (m.before == nullptr) {
    m.before = device_event::make();
    m.behind = device_event::make();
  }
  device_event::record(m.before, m.stream);
  m.state = DeviceMessage::State::queued;
  m.wanted = sending;
  link.queue.push_back(&m);
  return progress(link);
}

Status DeviceLinks::make(Link& link) {
  link.stream = make_stream();
  if (!link.sending) return channel_.recv(link.telling, &link.id, sizeof link.id, link.peer, link.tag);
  LOCKSTEP_RETURN_IF_ERROR(DeviceChannel::make_id(&link.id));
  LOCKSTEP_RETURN_IF_ERROR(channel_.send(link.telling, &link.id, sizeof link.id, link.peer, link.tag));
  Result<DeviceChannel> joined = DeviceChannel::join(link.id, 0, 2, kBlocksMax);
  if (!joined) return joined.status();
  link.channel.emplace(joined.take());
  return Status::ok();
}

void DeviceLinks::want(const DeviceMessage& m, int peer, int tag, bool sending) {
  if (m.state != DeviceMessage::State::queued) return;
  for (DeviceMessage* queued : links_.at({peer, tag, sending ? 1 : 0}).queue) {
    queued->wanted = true;
    if (queued == &m) return;
  }
}

Status DeviceLinks::progress() {
  for (auto& [key, link] : links_)
    if (!link.told || link.entering != nullptr || !link.queue.empty()) LOCKSTEP_RETURN_IF_ERROR(progress(link));
  return Status::ok();
}

Status DeviceLinks::progress(Link& link) {
  if (!link.told) LOCKSTEP_RETURN_IF_ERROR(link.telling.test(&link.told));
  if (!link.channel) {
    if (!link.told) return Status::ok();
    Result<DeviceChannel> joined = DeviceChannel::join(link.id, 1, 2, kBlocksMax);
    if (!joined) return joined.status();
    link.channel.emplace(joined.take());
  }
  for (;;) {
    bool ready = false;
    LOCKSTEP_RETURN_IF_ERROR(link.channel->test(&ready));
    if (!ready) return Status::ok();
    if (DeviceMessage* const m = std::exchange(link.entering, nullptr); m != nullptr) {
      device_memory::write_word(link.stream, m->word, m->mark);
      device_event::record(m->behind, link.stream);
      m->state = DeviceMessage::State::in_stream;
    }
    if (link.queue.empty() || !link.queue.front()->wanted) return Status::ok();
    link.entering = link.queue.front();
    link.queue.pop_front();
    link.entering->state = DeviceMessage::State::entering;
    device_event::wait(link.stream, link.entering->before);
    LOCKSTEP_RETURN_IF_ERROR(link.sending ? link.channel->send(link.stream, link.entering->piece, 1) : link.channel->recv(link.stream, link.entering->piece, 0));
  }
}

}  // namespace lockstep
