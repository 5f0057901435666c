#pragma once
// Internal to this room: the few things that are asked of NCCL or RCCL, which share one interface. The library is looked for by name when ranks first want
// it: a program without it starts, and no header of it is needed to build one. Only bytes are moved; it never adds anything.
//
// Every call starts something and returns at once; test() says when that is done: everyone has joined, or what is to be moved is in the stream, in whose order
// it then happens. One thing at a time. Failures are Status: the caller ends the job. Communicators are not blocking, so the library does all of it in threads of
// its own: nothing here waits for another rank, and an operation takes 54 us on an H200's host, of which 7 are its work.
//
// Threading: one thread, and beside it the watchdog's, which alone calls abort_all().

#include <cstddef>
#include <memory>
#include <span>

#include "core/status.h"
#include "parallel/channel.h"

namespace lockstep {

// A communicator: each of its ranks has a GPU of its own.
class DeviceChannel {
 public:
  static const char* library_name();  // of the file
  // 22809 of 2.28.9; an error says why it cannot be used.
  static Result<int> library_version();
  static std::string version_text(int version);  // "NCCL 2.28.9"

  // What ranks must know to join each other. One of them makes it.
  struct Id {
    char bytes[128];
  };
  static Status make_id(Id* id);
  // With the GPU that this thread has selected. blocks_max: of the GPU that one operation may occupy.
  static Result<DeviceChannel> join(const Id& id, int rank, int size, int blocks_max);

  DeviceChannel(DeviceChannel&&) noexcept;
  ~DeviceChannel();  // leaves the communicator as it is, like Channel's

  // By rank, empty where nothing goes or comes; one operation of all of them.
  Status exchange(void* stream, std::span<const BytePiece> sends, std::span<const BytePiece> recvs);
  Status send(void* stream, BytePiece piece, int to);
  Status recv(void* stream, BytePiece piece, int from);
  Status broadcast(void* stream, BytePiece piece, int root);

  Status test(bool* done);

  // The process is about to end: what runs on the GPU stops, and whoever calls anything else here waits for the end. May not return.
  static void abort_all();

 private:
  struct Communicator;
  explicit DeviceChannel(std::unique_ptr<Communicator> c);
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace lockstep
