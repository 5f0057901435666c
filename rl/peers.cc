#include "rl/peers.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>

#include <xxhash.h>

#include "parallel/grid.h"
#include "rl/sampling.h"

namespace lockstep {

namespace {

// Completions as words: prompt id (low half, high half), sample index, reason, numbers of tokens, chosen experts and chosen entries, then these: tokens,
// log-probs, versions, two experts a word, entries.
void append_words(std::vector<int32_t>& words, const Completion& c) {
  words.push_back(static_cast<int32_t>(static_cast<uint32_t>(c.prompt_id)));
  words.push_back(static_cast<int32_t>(static_cast<uint32_t>(c.prompt_id >> 32)));
  words.push_back(c.sample_idx);
  words.push_back(static_cast<int32_t>(c.reason));
  for (const size_t n : {c.tokens.size(), c.choices.experts.size(), c.choices.entries.size()}) words.push_back(static_cast<int32_t>(n));
  words.insert(words.end(), c.tokens.begin(), c.tokens.end());
  for (const float l : c.logprobs) words.push_back(std::bit_cast<int32_t>(l));
  words.insert(words.end(), c.versions.begin(), c.versions.end());
  const std::vector<uint16_t>& experts = c.choices.experts;
  words.resize(words.size() + (experts.size() + 1) / 2);
  if (!experts.empty()) std::memcpy(&words[words.size() - (experts.size() + 1) / 2], experts.data(), experts.size() * sizeof(uint16_t));
  words.insert(words.end(), c.choices.entries.begin(), c.choices.entries.end());
}

std::vector<Completion> read_words(std::span<const int32_t> words) {
  std::vector<Completion> completions;
  for (const int32_t* at = words.data(); at < words.data() + words.size();) {
    Completion& c = completions.emplace_back();
    const uint64_t low = static_cast<uint32_t>(*at++), high = static_cast<uint32_t>(*at++);
    c.prompt_id = low | high << 32;
    c.sample_idx = *at++;
    c.reason = static_cast<FinishReason>(*at++);
    const auto n = static_cast<size_t>(*at++), experts = static_cast<size_t>(*at++), entries = static_cast<size_t>(*at++);
    c.tokens.assign(at, at + n);
    at += n;
    c.logprobs.resize(n);
    std::memcpy(c.logprobs.data(), at, n * sizeof(float));
    at += n;
    c.versions.assign(at, at + n);
    at += n;
    c.choices.experts.resize(experts);
    if (experts > 0) std::memcpy(c.choices.experts.data(), at, experts * sizeof(uint16_t));
    at += (experts + 1) / 2;
    c.choices.entries.assign(at, at + entries);
    at += entries;
  }
  return completions;
}

// Of two different texts: "[optimizer] lr = 1e-3, there lr = 2e-4".
std::string first_difference(const std::string& here, const std::string& there) {
  std::istringstream a(here), b(there);
  std::string section;
  while (true) {
    std::string x, y;
    const bool more = !!std::getline(a, x), more_there = !!std::getline(b, y);
    if (x.starts_with('[')) section = x + " ";
    if (x != y || !more || !more_there) return fmt::format("{}{}, there {}", section, x, y);
  }
}

// The samples that `engine` runs, as requests.
std::vector<Request> samples_of(std::span<const Request> requests, int engines, int engine) {
  int64_t total = 0, first = 0;
  for (const Request& r : requests) total += r.num_samples;
  const Range own = part_of(total, engines, engine);
  std::vector<Request> share;
  for (const Request& r : requests) {
    const int64_t begin = std::max(own.begin, first), end = std::min(own.end, first + r.num_samples);
    if (begin < end) {
      share.push_back(r);
      share.back().first_sample = r.first_sample + static_cast<int32_t>(begin - first);
      share.back().num_samples = static_cast<int32_t>(end - begin);
    }
    first += r.num_samples;
  }
  return share;
}

}  // namespace

Peers Peers::side() const {
  Peers own = *this;
  if (!apart()) return own;
  own.group_ = groups_->side->size() > 1 ? groups_->side.get() : nullptr;
  own.is_side_ = true;
  return own;
}

Status Peers::agree(const Status& mine, Purpose p) const { return alone() ? mine : group_->agree(mine, p); }

Status Peers::same(uint64_t value, const char* what, int64_t kind) const {
  if (alone()) return Status::ok();
  std::vector<int64_t> all(static_cast<size_t>(2 * size()));
  const int64_t mine[] = {kind, std::bit_cast<int64_t>(value)};
  group_->all_gather(std::span(all), std::span(mine), what);
  for (size_t r = 0; r < all.size() / 2; ++r) {
    size_t first = 0;
    while (all[2 * first] != all[2 * r]) ++first;
    if (all[2 * first + 1] == all[2 * r + 1]) continue;
    return errorf("rank {} has other {} than rank {} (checksums {:016x} and {:016x})", r, what, first, std::bit_cast<uint64_t>(all[2 * r + 1]),
                  std::bit_cast<uint64_t>(all[2 * first + 1]));
  }
  return Status::ok();
}

Status Peers::same_settings(const std::string& mine) const {
  if (alone()) return Status::ok();
  std::string first = mine;
  tell(&first, "settings");
  return agree(mine == first ? Status::ok() : errorf("other settings than rank 0: {}", first_difference(mine, first)), "settings");
}

uint64_t Peers::sum(uint64_t mine, const char* what) const {
  if (alone()) return mine;
  std::vector<int64_t> all(static_cast<size_t>(size()));
  const auto word = std::bit_cast<int64_t>(mine);
  group_->all_gather(std::span(all), std::span(&word, 1), what);
  uint64_t sum = 0;
  for (const int64_t v : all) sum += std::bit_cast<uint64_t>(v);
  return sum;
}

void Peers::tell(std::string* text, Purpose p, int from) const {
  if (!alone()) group_->broadcast(text, from, p);
}

Status Peers::told(const Status& mine, Purpose p, int from) const {
  std::string text = mine ? "" : "!" + mine.message();
  tell(&text, p, from);
  return text.empty() ? Status::ok() : Status::error(text.substr(1));
}

int Peers::threads(int64_t asked) const {
  if (alone() || asked > 0) return static_cast<int>(asked);
  std::vector<int64_t> hosts(static_cast<size_t>(size()));
  const auto mine = std::bit_cast<int64_t>(checksum(this_process().host));
  group_->all_gather(std::span(hosts), std::span(&mine, 1), "hosts");
  const auto neighbours = std::count(hosts.begin(), hosts.end(), mine);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency() / neighbours));
}

Result<std::vector<Completion>> Peers::run(Engine* engine, Context& c, std::span<const Request> requests, const Hooks& hooks,
                                           const std::string& label, const OnFinished& on_finished) const {
  if (apart()) return share(samples() ? side().run(engine, c, requests, hooks, label, on_finished) : std::vector<Completion>());
  if (alone()) return run_requests(*engine, requests, hooks, label, on_finished);
  const std::vector<Request> share = samples_of(requests, num_engines(), engine_of(rank()));
  LOCKSTEP_RETURN_IF_ERROR(agree(submit_requests(*engine, share), "rollout"));
  Result<std::vector<Completion>> mine = finish_requests(*engine, share, hooks, label, leads_engine() ? on_finished : OnFinished());
  LOCKSTEP_RETURN_IF_ERROR(agree(mine.status(), "rollout"));
  return gather(c, mine.value());
}

Result<Peers::FirstGroups> Peers::run_first(Engine* engine, Context& c, std::span<const Request> requests, int64_t groups, const Hooks& hooks,
                                            const std::string& label) const {
  FirstGroups first;
  if (requests.empty()) return first;
  if (apart()) {
    Result<FirstGroups> drawn = samples() ? side().run_first(engine, c, requests, groups, hooks, label) : FirstGroups();
    LOCKSTEP_RETURN_IF_ERROR(told(drawn.status(), "rollout", first_sampler()));
    first = drawn.take();
    broadcast(first.completions, "completions", first_sampler());
    first.complete.resize(static_cast<size_t>(groups));
    group_->broadcast(std::span(first.complete), first_sampler(), "first groups");
    return first;
  }
  std::map<int64_t, size_t> place;  // by prompt id, in order of it
  for (const Request& r : requests) place.emplace(static_cast<int64_t>(r.prompt_id), place.size());
  CHECK(groups <= static_cast<int64_t>(place.size()), "{} of {} prompts", groups, place.size());
  std::vector<int64_t> missing(place.size()), mine(place.size()), all(place.size() * static_cast<size_t>(size()));
  for (const Request& r : requests) missing[place[static_cast<int64_t>(r.prompt_id)]] += r.num_samples;

  const std::vector<Request> share = alone() ? std::vector(requests.begin(), requests.end()) : samples_of(requests, num_engines(), engine_of(rank()));
  LOCKSTEP_RETURN_IF_ERROR(agree(submit_requests(*engine, share), "rollout"));
  const auto enough = [&](std::span<const Completion> finished) {
    std::fill(mine.begin(), mine.end(), 0);
    if (leads_engine())
      for (const Completion& done : finished) ++mine[place[static_cast<int64_t>(done.prompt_id)]];
    std::span<const int64_t> counts = mine;
    if (!alone()) {
      group_->all_gather(std::span(all), counts, "first groups");
      counts = all;
    }
    std::vector<int64_t> now(place.size());
    for (size_t i = 0; i < counts.size(); ++i) now[i % place.size()] += counts[i];
    for (const auto& [id, i] : place) {
      missing[i] -= now[i];
      if (now[i] > 0 && missing[i] == 0 && std::ssize(first.complete) < groups) first.complete.push_back(id);
    }
    return std::ssize(first.complete) == groups;
  };
  const std::vector<Completion> drawn = finish_until(*engine, share, hooks, label, enough);
  if (alone()) {
    first.completions = drawn;
    return first;
  }
  Result<std::vector<Completion>> everyones = gather(c, drawn);
  if (!everyones) return everyones.status();
  first.completions = everyones.take();
  return first;
}

Result<std::vector<Completion>> Peers::gather(Context& c, std::span<const Completion> mine) const {
  std::vector<int32_t> words;
  for (const Completion& done : mine) append_words(words, done);
  // The ranks of one engine have the same words; the first of them gives them away.
  LOCKSTEP_RETURN_IF_ERROR(same(XXH64(words.data(), words.size() * sizeof(int32_t), 0), "completions", engine_of(rank())));
  if (!leads_engine()) words.clear();
  std::vector<int64_t> counts(static_cast<size_t>(size()));
  const auto count = static_cast<int64_t>(words.size());
  group_->all_gather(std::span(counts), std::span(&count, 1), "completions");
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<int32_t> all(static_cast<size_t>(total));
  Context host = c.on_host();
  group_->all_gather(host, TensorView(all.data(), DType::i32, {total}), TensorView(words.data(), DType::i32, {count}), counts, "completions");
  return read_words(all);
}

Result<std::vector<Completion>> Peers::share(Result<std::vector<Completion>> drawn) const {
  if (!apart()) return drawn;
  LOCKSTEP_RETURN_IF_ERROR(told(drawn.status(), "rollout", first_sampler()));
  broadcast(drawn.value(), "completions", first_sampler());
  return drawn;
}

void Peers::broadcast(std::vector<Completion>& completions, const char* what, int from) const {
  if (alone()) return;
  std::vector<int32_t> words;
  if (rank() == from)
    for (const Completion& c : completions) append_words(words, c);
  std::string bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int32_t));
  group_->broadcast(&bytes, from, what);
  words.resize(bytes.size() / sizeof(int32_t));
  std::memcpy(words.data(), bytes.data(), bytes.size());
  completions = read_words(words);
}

Result<std::vector<RewardResult>> Peers::grade(Judge& judge, std::span<const GradeRow> rows) const {
  if (alone() || judge.is_pure()) return judge.grade(rows);
  std::string text = first() ? verdicts_text(judge.grade(rows)) : "";
  tell(&text, "verdicts");
  return verdicts_from_text(text);
}

uint64_t checksum(const std::string& text) { return XXH64(text.data(), text.size(), 0); }

}  // namespace lockstep
