// lockstep convert SRC DST, export CHECKPOINT DIR and synth CONFIG DST: checkpoints in the layouts that other programs read.

#include <algorithm>
#include <cstdio>
#include <thread>

#include <fmt/format.h>

#include "cli/console.h"
#include "model/checkpoint_writer.h"
#include "rl/checkpoint.h"

namespace lockstep {

namespace {

WriteOptions make_options(const std::string& layout, uint64_t shard_bytes) {
  WriteOptions options;
  options.layout = checkpoint_layout(layout).value();  // the command line has checked it
  options.shard_bytes = shard_bytes;
  options.on_shard = [](int64_t shard, int64_t shards) {
    if (shards > 1) std::fprintf(stderr, "shard %lld of %lld\n", static_cast<long long>(shard), static_cast<long long>(shards));
  };
  return options;
}

void print_report(const std::string& directory, const std::string& layout, const WriteReport& report) {
  fmt::print("{}: {}, {} tensors in {} {}, {} bytes\n", directory, layout, report.tensors, report.shards, report.shards == 1 ? "file" : "files",
             report.bytes);
  for (size_t i = 0; i < std::size(report.by_storage); ++i) {
    const StorageReport& r = report.by_storage[i];
    const Storage storage = static_cast<Storage>(i);
    if (r.tensors == 0) continue;
    fmt::print("  {:<5} {} tensors, {} numbers: ", storage_name(storage), r.tensors, r.elements);
    if (r.inexact_elements == 0) {
      fmt::print("all as in the source");
    } else if (is_quantised(storage)) {
      fmt::print("not representable and rounded: {} numbers in {} of {} blocks in {} tensors", r.inexact_elements, r.inexact_blocks, r.blocks,
                 r.inexact_tensors);
    } else {
      fmt::print("not representable and rounded: {} numbers in {} tensors", r.inexact_elements, r.inexact_tensors);
    }
    fmt::print("{}\n", r.copied > 0 ? fmt::format(" ({} tensors copied byte for byte)", r.copied) : "");
  }
}

int write(const std::string& directory, Result<WriteSource> source, const std::string& layout, uint64_t shard_bytes) {
  if (!source) return fail(kExitBadInput, source.status());
  if (const Status s = check_new_directory(directory); !s) return fail(kExitBadInput, s);
  CpuContext context(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  const Result<WriteReport> report = write_checkpoint(context, directory, source.value(), make_options(layout, shard_bytes));
  if (!report) return fail(kExitFailure, report.status());
  print_report(directory, layout, report.value());
  return kExitOk;
}

// From a checkpoint, or the newest of a run.
int convert(const std::string& from, const std::string& directory, const std::string& layout, uint64_t shard_bytes) {
  Result<std::string> checkpoint = find_checkpoint(from);
  if (!checkpoint) return fail(kExitBadInput, checkpoint.status());
  if (const Status s = check_checkpoint(checkpoint.value()); !s) return fail(kExitBadInput, s);
  return write(directory, open_write_source(checkpoint.value()), layout, shard_bytes);
}

}  // namespace

int convert_command(const ConvertArgs& args) { return convert(args.source, args.directory, args.layout, args.shard_bytes); }

int export_command(const ExportArgs& args) { return convert(args.checkpoint, args.directory, "f32", UINT64_MAX); }

int synth_command(const SynthArgs& args) {
  Result<WriteSource> source = random_write_source(args.config, static_cast<uint64_t>(args.seed));
  if (!args.headers_only) return write(args.directory, std::move(source), args.layout, args.shard_bytes);
  if (!source) return fail(kExitBadInput, source.status());
  const WriteReport report = plan_checkpoint(source.value().config, make_options(args.layout, args.shard_bytes));
  fmt::print("{}: {}, {} tensors in {} {}, {} bytes\n", args.config, args.layout, report.tensors, report.shards,
             report.shards == 1 ? "file" : "files", report.bytes);
  for (size_t i = 0; i < std::size(report.by_storage); ++i)
    if (const StorageReport& r = report.by_storage[i]; r.tensors > 0)
      fmt::print("  {:<5} {} tensors, {} numbers\n", storage_name(static_cast<Storage>(i)), r.tensors, r.elements);
  return kExitOk;
}

}  // namespace lockstep
