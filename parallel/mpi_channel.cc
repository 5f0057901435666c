#include <mpi.h>

#include <climits>
#include <cstdlib>

#include "parallel/channel.h"

namespace lockstep {

namespace {

Status check(int code, const char* call) {
  if (code == MPI_SUCCESS) return Status::ok();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return errorf("{}: {}", call, std::string_view(text, length));
}

// Bytes as MPI counts them: its counts are int, so what is larger becomes one element of a type made for it.
class Bytes {
 public:
  explicit Bytes(size_t bytes) {
    if (bytes <= INT_MAX) {
      count_ = static_cast<int>(bytes);
      return;
    }
    const size_t blocks = bytes / kBlock;
    const int rest = static_cast<int>(bytes % kBlock);
    CHECK(blocks <= INT_MAX, "{} bytes in one message", bytes);
    MPI_Datatype block, body;
    MPI_Type_contiguous(kBlock, MPI_BYTE, &block);
    MPI_Type_contiguous(static_cast<int>(blocks), block, &body);
    const int lengths[] = {1, rest};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(blocks * kBlock)};
    const MPI_Datatype parts[] = {body, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, places, parts, &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&block);
    MPI_Type_free(&body);
    count_ = 1;
  }
  ~Bytes() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);  // pending operations keep it
  }
  Bytes(const Bytes&) = delete;
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  static constexpr int kBlock = 1 << 20;
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

MPI_Op op_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return MPI_SUM;
    case Reduction::max:
      return MPI_MAX;
    case Reduction::min:
      return MPI_MIN;
  }
  return MPI_SUM;
}

}  // namespace

struct Pending::Requests {
  explicit Requests(int capacity) : handles(capacity, MPI_REQUEST_NULL), statuses(capacity), expected(capacity, -1) {}
  std::vector<MPI_Request> handles;
  std::vector<MPI_Status> statuses;
  std::vector<int64_t> expected;  // bytes of a receive; -1 for the rest
  int used = 0;

  MPI_Request* add(int64_t bytes) {
    CHECK(used < static_cast<int>(handles.size()), "{} operations at once", handles.size());
    expected[used] = bytes;
    return &handles[used++];
  }
};

Pending::Pending(int capacity) : requests_(std::make_unique<Requests>(capacity)) {}
Pending::~Pending() = default;
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;

Status Pending::test(bool* done) {
  Requests& r = *requests_;
  int all = 1;
  const int code = MPI_Testall(r.used, r.handles.data(), &all, r.statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < r.used; ++i)
      if (const int e = r.statuses[i].MPI_ERROR; e != MPI_SUCCESS && e != MPI_ERR_PENDING) return check(e, "MPI_Testall");
  }
  LOCKSTEP_RETURN_IF_ERROR(check(code, "MPI_Testall"));
  *done = all != 0;
  if (!all) return Status::ok();
  for (int i = 0; i < r.used; ++i) {
    if (r.expected[i] < 0) continue;
    MPI_Count bytes = 0;
    MPI_Get_elements_x(&r.statuses[i], MPI_BYTE, &bytes);
    if (bytes != r.expected[i]) return errorf("{} bytes came where {} were expected", static_cast<int64_t>(bytes), r.expected[i]);
  }
  r.used = 0;
  return Status::ok();
}

struct Channel::Communicator {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
};

Channel::Channel(std::unique_ptr<Communicator> c) : communicator_(std::move(c)) {}
Channel::Channel(Channel&&) noexcept = default;
Channel::~Channel() = default;  // communicators live as long as the process: freeing one is a collective that could stall
int Channel::rank() const { return communicator_->rank; }
int Channel::size() const { return communicator_->size; }

std::string Channel::library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text).substr(0, std::string_view(text).find_first_of(",\n"));
}

Result<bool> Channel::launched() {
  // What mpirun, mpiexec and srun set. Everything else about a run comes from its file and the command line.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"})
    if (std::getenv(name) != nullptr) return true;
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  if (tasks != nullptr && std::atoi(tasks) > 1 && std::getenv("SLURM_PROCID") != nullptr)
    return errorf("srun started {} tasks that do not know each other; start with srun --mpi=pmix (or mpirun)", tasks);
  return false;
}

Result<Channel> Channel::join() {
  int provided = 0;
  LOCKSTEP_RETURN_IF_ERROR(check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread"));
  if (provided < MPI_THREAD_SERIALIZED)
    return errorf("this MPI library allows only its main thread to call it (level {}); build it with thread support", provided);
  auto c = std::make_unique<Communicator>();
  // A duplicate, so that nobody else's messages can be taken for ours.
  LOCKSTEP_RETURN_IF_ERROR(check(MPI_Comm_dup(MPI_COMM_WORLD, &c->comm), "MPI_Comm_dup"));
  MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(c->comm, &c->rank);
  MPI_Comm_size(c->comm, &c->size);
  return Channel(std::move(c));
}

Status Channel::leave() { return check(MPI_Finalize(), "MPI_Finalize"); }

Result<Channel> Channel::subset(const std::vector<int>& ranks, int tag) {
  MPI_Group all = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  LOCKSTEP_RETURN_IF_ERROR(check(MPI_Comm_group(communicator_->comm, &all), "MPI_Comm_group"));
  LOCKSTEP_RETURN_IF_ERROR(check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &group), "MPI_Group_incl"));
  auto c = std::make_unique<Communicator>();
  LOCKSTEP_RETURN_IF_ERROR(check(MPI_Comm_create_group(communicator_->comm, group, tag, &c->comm), "MPI_Comm_create_group"));
  MPI_Group_free(&group);
  MPI_Group_free(&all);
  MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(c->comm, &c->rank);
  MPI_Comm_size(c->comm, &c->size);
  return Channel(std::move(c));
}

Status Channel::send(Pending& p, const void* data, size_t bytes, int to, int tag) {
  const Bytes b(bytes);
  return check(MPI_Isend(data, b.count(), b.type(), to, tag, communicator_->comm, p.requests_->add(-1)), "MPI_Isend");
}

Status Channel::recv(Pending& p, void* data, size_t bytes, int from, int tag) {
  const Bytes b(bytes);
  return check(
      MPI_Irecv(data, b.count(), b.type(), from, tag, communicator_->comm, p.requests_->add(static_cast<int64_t>(bytes))),
      "MPI_Irecv");
}

Status Channel::progress() {
  int found = 0;
  return check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_->comm, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
}

Status Channel::barrier(Pending& p) { return check(MPI_Ibarrier(communicator_->comm, p.requests_->add(-1)), "MPI_Ibarrier"); }

Status Channel::broadcast(Pending& p, void* data, size_t bytes, int root) {
  const Bytes b(bytes);
  return check(MPI_Ibcast(data, b.count(), b.type(), root, communicator_->comm, p.requests_->add(-1)), "MPI_Ibcast");
}

Status Channel::all_reduce(Pending& p, int64_t* data, int count, Reduction reduction) {
  return check(
      MPI_Iallreduce(MPI_IN_PLACE, data, count, MPI_INT64_T, op_of(reduction), communicator_->comm, p.requests_->add(-1)),
      "MPI_Iallreduce");
}

}  // namespace lockstep
