#pragma once
// Internal to this room: messages from GPU to GPU, as RankGroup's start_send and start_recv promise them.
//
// All messages of one peer, tag and direction are a link: a communicator of these two ranks and a stream of its own. They follow each other there, and nothing
// else waits for them: neither other work of the rank nor what goes the other way. A message that is sent enters the stream when it is started, behind
// the work that made it; one that is received when the rank waits for it, so that nothing occupies the GPU before. A link is made by its first message,
// for which the sender tells the receiver by way of the group's channel, under the message's tag, how to join.
//
// Nothing here waits. progress() moves on what can move; every wait of the room calls it.

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "parallel/device_channel.h"

namespace lockstep {

struct DeviceMessage {
  enum class State : uint8_t { none, queued, entering, in_stream };
  State state = State::none;
  bool wanted = false;     // may enter the link's stream
  BytePiece piece;
  void* stream = nullptr;  // of the context that made or will read it
  // In the link's stream *word becomes `mark` once the message has gone or come, and then `behind` is done.
  uint64_t* word = nullptr;
  uint64_t mark = 0;
  void* before = nullptr;  // events, made when first used; in `stream`: what the message waits for
  void* behind = nullptr;
};

class DeviceLinks {
 public:
  explicit DeviceLinks(Channel& channel) : channel_(channel) {}
  DeviceLinks(const DeviceLinks&) = delete;

  // `m` stays where it is until its state is in_stream; stream, piece, word and mark are set.
  Status start(DeviceMessage& m, int peer, int tag, bool sending);
  // The rank waits for it, and so for those started before it.
  void want(const DeviceMessage& m, int peer, int tag, bool sending);
  Status progress();

 private:
  struct Link {
    int peer = 0, tag = 0;
    bool sending = false;
    DeviceChannel::Id id;
    Pending telling{1};
    bool told = false;
    std::optional<DeviceChannel> channel;
    void* stream = nullptr;
    DeviceMessage* entering = nullptr;
    std::deque<DeviceMessage*> queue;
  };
  Status make(Link& link);
  Status progress(Link& link);
  static constexpr int kBlocksMax = 8;  // that a message occupies while its sender waits for the receiver; about 150 GB/s on an H200

  Channel& channel_;
  std::map<std::array<int, 3>, Link> links_;  // by peer, tag and direction
};

}  // namespace lockstep
