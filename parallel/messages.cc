#include <cstring>

#include "core/device.h"
#include "parallel/group_state.h"

namespace lockstep {

RankGroup::Request RankGroup::start(const char* kind, Context& c, void* data, int64_t bytes, int peer, int tag, const Purpose& p) {
  Impl& g = *impl_;
  CHECK(peer >= 0 && peer < size() && peer != rank(), "{} \"{}\": rank {} with itself or outside: {} of {}", kind, p.name, rank(),
        peer, size());
  CHECK(tag >= 0 && tag <= kTagMax, "{} \"{}\": tag {}", kind, p.name, tag);
  const bool sending = kind[0] == 's';
  int slot = 0;
  while (slot < kRequestsMax && g.slots[slot].ticket >= 0) ++slot;
  CHECK(slot < kRequestsMax, "{} \"{}\": {} requests are open in {}", kind, p.name, kRequestsMax, name());
  Impl::Slot& s = g.slots[slot];
  s.name = p.name;
  s.bytes = sending ? CommBytes{bytes, 0} : CommBytes{0, bytes};
  s.ticket = g.world->watchdog_->begin({.kind = kind,
                                        .name = p.name,
                                        .group = g.id,
                                        .seq = ++g.messages[{peer, tag, sending ? 0 : 1}],
                                        .peer = g.members[peer],
                                        .tag = tag,
                                        .bytes = bytes,
                                        .file = p.file,
                                        .line = p.line,
                                        .deadline_s = p.deadline_s,
                                        .background = true});
  s.peer = peer;
  s.tag = tag;
  if (between_gpus(c) && bytes > 0) {
    if (!g.device_links) g.world->links_.push_back(&g.device_links.emplace(*g.channel));
    DeviceMessage& m = s.message;
    m.piece = {static_cast<char*>(data), bytes};
    m.stream = c.stream;
    m.word = &g.world->words_[s.ticket];
    m.mark = ++g.world->last_mark_;
    require(g.device_links->start(m, peer, tag, sending));
    return {slot};
  }
  if (c.on_gpu()) {
    s.staged.resize(static_cast<size_t>(bytes));
    if (sending) {
      download_bytes(c, s.staged.data(), data, s.staged.size());
    } else {
      s.context = &c;
      s.device = data;
    }
    data = s.staged.data();
  }
  if (sending)
    require(g.channel->send(s.pending, data, static_cast<size_t>(bytes), peer, tag));
  else
    require(g.channel->recv(s.pending, data, static_cast<size_t>(bytes), peer, tag));
  return {slot};
}

RankGroup::Request RankGroup::start_send(Context& c, ConstTensorView x, int to, int tag, Purpose p) {
  check_contiguous("send", x);
  return start("send", c, const_cast<void*>(x.data), static_cast<int64_t>(x.bytes()), to, tag, p);
}

RankGroup::Request RankGroup::start_recv(Context& c, TensorView x, int from, int tag, Purpose p) {
  check_contiguous("recv", x);
  return start("recv", c, x.data, static_cast<int64_t>(x.bytes()), from, tag, p);
}

bool RankGroup::test(Request request) {
  Impl::Slot& s = impl_->open(request);
  if (s.message.state != DeviceMessage::State::none) {
    impl_->device_links->want(s.message, s.peer, s.tag, s.bytes.sent > 0);
    progress();
    if (s.message.state != DeviceMessage::State::in_stream || !device_event::done(s.message.behind)) return false;
  } else {
    bool done = false;
    require(s.pending.test(&done));
    if (!done) {
      progress();
      return false;
    }
    if (s.context != nullptr) upload_bytes(*s.context, s.device, s.staged.data(), s.staged.size());
    s.context = nullptr;
  }
  impl_->world->watchdog_->end(s.ticket);
  leave(request);
  return true;
}

// Counts a request that is complete, or in a stream, and frees its place.
void RankGroup::leave(Request request) {
  Impl::Slot& s = impl_->slots[request.slot];
  s.ticket = -1;
  s.message.state = DeviceMessage::State::none;
  Traffic& t = impl_->traffic(s.name);
  ++t.calls;
  t.bytes.sent += s.bytes.sent;
  t.bytes.received += s.bytes.received;
}

void RankGroup::wait(Request request) {
  Impl::Slot& s = impl_->open(request);
  DeviceMessage& m = s.message;
  const bool between_gpus = m.state != DeviceMessage::State::none;
  if (!between_gpus && test(request)) return;
  impl_->world->watchdog_->waiting(s.ticket);
  const char* name = s.name;
  const double start = now_s();
  if (between_gpus) {
    impl_->device_links->want(m, s.peer, s.tag, s.bytes.sent > 0);
    progress();
    for (Backoff backoff; m.state != DeviceMessage::State::in_stream; backoff.pause()) progress();
    device_event::wait(m.stream, m.behind);
    impl_->world->watchdog_->in_stream(s.ticket, m.word, m.mark);
    leave(request);
  } else {
    for (Backoff backoff(s.bytes.sent + s.bytes.received); !test(request);) backoff.pause();
  }
  impl_->traffic(name).wait_s += now_s() - start;
}

void RankGroup::send(Context& c, ConstTensorView x, int to, int tag, Purpose p) { wait(start_send(c, x, to, tag, p)); }
void RankGroup::recv(Context& c, TensorView x, int from, int tag, Purpose p) { wait(start_recv(c, x, from, tag, p)); }
}  // namespace lockstep
