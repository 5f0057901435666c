#include "parallel/flight.h"

#include <charconv>

#include "io/json.h"

namespace lockstep {

namespace {

using Kind = JsonValue::Kind;

constexpr const char* kCauses[] = {"stall", "error", "crash", "peer_gone", "terminated", "told"};

// Members of one object. A missing or ill-typed member is remembered, so that the caller asks once, at the end.
class Reader {
 public:
  explicit Reader(const JsonValue& object) : object_(object) {}

  std::string text(const char* name) {
    const JsonValue* v = object_.find(name);
    if (v == nullptr || !v->is(Kind::string)) return fail(name, "a string"), "";
    return v->text;
  }
  int64_t integer(const char* name) {
    const JsonValue* v = object_.find(name);
    int64_t out = 0;
    if (v == nullptr || !v->as_int64(&out)) fail(name, "an integer");
    return out;
  }
  double real(const char* name) {
    const JsonValue* v = object_.find(name);
    double out = 0;
    if (v == nullptr || !v->is(Kind::number)) return fail(name, "a number"), out;
    std::from_chars(v->text.data(), v->text.data() + v->text.size(), out);
    return out;
  }
  std::vector<int> integers(const char* name) {
    std::vector<int> out;
    const JsonValue* v = object_.find(name);
    if (v == nullptr || !v->is(Kind::array)) return fail(name, "an array"), out;
    for (const JsonValue& item : v->items) {
      int64_t i = 0;
      if (!item.as_int64(&i)) fail(name, "an array of integers");
      out.push_back(static_cast<int>(i));
    }
    return out;
  }
  bool has(const char* name) const { return object_.find(name) != nullptr; }
  Status status() const { return wrong_.empty() ? Status::ok() : Status::error(wrong_); }

 private:
  void fail(const char* name, const char* wanted) {
    if (wrong_.empty()) wrong_ = fmt::format("\"{}\" must be {}", name, wanted);
  }
  const JsonValue& object_;
  std::string wrong_;
};

Status read_head(const JsonValue& object, FlightRecord* out) {
  Reader r(object);
  out->rank = static_cast<int>(r.integer("rank"));
  out->world = static_cast<int>(r.integer("world"));
  out->host = r.text("host");
  out->pid = r.integer("pid");
  out->text = r.text("text");
  out->wall_s = r.real("wall_s");
  out->age_s = r.real("age_s");
  const std::string cause = r.text("cause");
  LOCKSTEP_RETURN_IF_ERROR(r.status());
  if (out->world < 1 || out->rank < 0 || out->rank >= out->world) return errorf("rank {} of {}", out->rank, out->world);
  for (size_t i = 0; i < std::size(kCauses); ++i) {
    if (cause != kCauses[i]) continue;
    out->cause = static_cast<FlightCause>(i);
    return Status::ok();
  }
  return errorf("\"cause\" is \"{}\"", cause);
}

Status read_line(const JsonValue& object, FlightRecord* out) {
  Reader r(object);
  if (r.has("op")) {
    FlightOp op;
    op.kind = r.text("op");
    op.name = r.text("name");
    op.group = r.text("group");
    op.seq = r.integer("seq");
    op.peer = static_cast<int>(r.integer("peer"));
    op.tag = static_cast<int>(r.integer("tag"));
    op.bytes = r.integer("bytes");
    op.caller = r.text("caller");
    op.start_s = r.real("start_s");
    if (r.has("end_s")) op.end_s = r.real("end_s");
    op.waited = !r.has("background");
    out->ops.push_back(std::move(op));
  } else if (r.has("group")) {
    out->groups.push_back({r.text("group"), r.integers("members"), r.integer("started")});
  } else {
    out->peers.push_back({static_cast<int>(r.integer("peer")), r.integer("pid"), r.text("state")});
  }
  return r.status();
}

}  // namespace

const char* flight_cause_name(FlightCause cause) { return kCauses[static_cast<int>(cause)]; }

std::string format_flight_record(const FlightRecord& record) {
  std::string text = JsonLine()
                         .add("rank", record.rank)
                         .add("world", record.world)
                         .add("host", record.host)
                         .add("pid", record.pid)
                         .add("cause", flight_cause_name(record.cause))
                         .add("text", record.text)
                         .add("wall_s", record.wall_s)
                         .add("age_s", record.age_s)
                         .str() +
                     "\n";
  for (const FlightGroup& g : record.groups) {
    const std::vector<int32_t> members(g.members.begin(), g.members.end());
    text +=
        JsonLine().add("group", g.name).add("members", std::span<const int32_t>(members)).add("started", g.started).str() + "\n";
  }
  for (const FlightPeer& p : record.peers)
    text += JsonLine().add("peer", p.rank).add("pid", p.pid).add("state", p.state).str() + "\n";
  for (const FlightOp& op : record.ops) {
    JsonLine line;
    line.add("op", op.kind)
        .add("name", op.name)
        .add("group", op.group)
        .add("seq", op.seq)
        .add("peer", op.peer)
        .add("tag", op.tag);
    line.add("bytes", op.bytes).add("caller", op.caller).add("start_s", op.start_s);
    if (!op.pending()) line.add("end_s", op.end_s);
    if (!op.waited) line.add("background", true);
    text += line.str() + "\n";
  }
  return text;
}

Result<FlightRecord> parse_flight_record(std::string_view text, std::string_view origin) {
  FlightRecord record;
  int number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = text.find('\n');
    const Result<JsonValue> parsed = parse_json(text.substr(0, end));
    if (!parsed) return errorf("{}:{}: {}", origin, number, parsed.message());
    if (!parsed.value().is(Kind::object)) return errorf("{}:{}: an object is wanted", origin, number);
    const Status s = number == 1 ? read_head(parsed.value(), &record) : read_line(parsed.value(), &record);
    if (!s) return errorf("{}:{}: {}", origin, number, s.message());
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  if (number == 0) return errorf("{}: the record is empty", origin);
  return record;
}

}  // namespace lockstep
