#pragma once
// Decode steps as graphs of a GPU (core/device.h): the launches of a step that was seen before are enqueued by one call. A graph holds every address and number that the host
// told the kernels, so steps share one only where all of these are equal: the shape.
//
// A shape's first step runs as it is, which brings arenas to their high marks and loads kernels; its second is captured and run, and later ones run what was captured.
// At most kDecodeGraphsMax shapes are remembered, those used last.
//
// Not thread-safe; belongs to an engine.

#include <cstdint>
#include <span>
#include <vector>

#include "core/device.h"
#include "model/batch.h"

namespace lockstep {

inline constexpr size_t kDecodeGraphsMax = 64;

// Rows that n are padded to, so that few shapes serve all batches: four sizes between a power of two and the next, at most a fifth of them padding.
int64_t padded_rows(int64_t n);
// Positions likewise, by powers of two from 1024 on, below which no kernel would save anything.
int64_t padded_positions(int64_t n);

// What the host says of a step.
class DecodeShape {
 public:
  void clear() { words_.clear(); }
  void add(uint64_t word) { words_.push_back(word); }
  void add(ConstTensorView v);  // where it lies and its shape, not what it holds
  void add(const SequenceBatch& batch);
  bool operator==(const DecodeShape&) const = default;

 private:
  std::vector<uint64_t> words_;  // always in the same order
};

class DecodeGraphs {
 public:
  // Enqueues what `work` does, which enqueues the same whenever `shape` is the same. True: by a graph, this step's or an earlier one's.
  template <typename Work>
  bool run(Context& c, const DecodeShape& shape, const Work& work) {
    bool is_new = false;
    Known& known = find(shape, &is_new);
    if (is_new) {
      work();
      return false;
    }
    if (known.graph.empty()) known.graph = DeviceGraph::capture(c, work);
    known.graph.run(c);
    return true;
  }
  size_t size() const { return known_.size(); }

 private:
  struct Known {
    DecodeShape shape;
    DeviceGraph graph;  // empty until the second step
    int64_t used = 0;
  };
  Known& find(const DecodeShape& shape, bool* is_new);

  std::vector<Known> known_;
  int64_t steps_ = 0;
};

}  // namespace lockstep
