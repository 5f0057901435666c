#include "ops/matmul/blas_library.h"

// The build defines one of them where it finds the library's header. Host code alone: any C++ compiler reads it.
#if LOCKSTEP_CUBLASLT || LOCKSTEP_HIPBLASLT

#include <dlfcn.h>

#include <vector>

#if LOCKSTEP_HIPBLASLT
#include <hipblaslt/hipblaslt.h>
#define LT(name) hipblasLt##name
#define LT_VALUE(name) HIPBLASLT_##name
#define BLAS_VALUE(name) HIPBLAS_##name
#define TYPE_VALUE(name) HIP_##name
#else
#include <cublasLt.h>
#define LT(name) cublasLt##name
#define LT_VALUE(name) CUBLASLT_##name
#define BLAS_VALUE(name) CUBLAS_##name
#define TYPE_VALUE(name) CUDA_##name
#endif

namespace lockstep::gpu {

namespace {

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#if LOCKSTEP_HIPBLASLT
constexpr const char* kFile = "libhipblaslt.so";
using DataType = hipDataType;
using Operation = hipblasOperation_t;
using Stream = hipStream_t;
constexpr auto kOk = HIPBLAS_STATUS_SUCCESS;
#else
constexpr const char* kFile = "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR);
using DataType = cudaDataType;
using Operation = cublasOperation_t;
using Stream = cudaStream_t;
constexpr auto kOk = CUBLAS_STATUS_SUCCESS;
#endif

void* library() {
  static void* const loaded = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  return loaded;
}
// A function of the library, found once.
#define CALL(name)                                                                                    \
  ([] {                                                                                               \
    static const auto found = reinterpret_cast<decltype(&LT(name))>(dlsym(library(), TEXT(LT(name)))); \
    return found;                                                                                     \
  }())

LT(Handle_t) handle() {
  static const LT(Handle_t) made = [] {
    LT(Handle_t) h = nullptr;
    return library() != nullptr && CALL(Create)(&h) == kOk ? h : nullptr;
  }();
  return made;
}

DataType type_of(DType t) { return t == DType::f32 ? TYPE_VALUE(R_32F) : t == DType::bf16 ? TYPE_VALUE(R_16BF) : TYPE_VALUE(R_8F_E4M3); }

}  // namespace

Result<std::string> blas_library() {
  if (library() == nullptr) {
    const char* why = dlerror();
    return Status::error(std::string(kFile) + " cannot be loaded (" + (why == nullptr ? "see above" : why) + "); add its directory to LD_LIBRARY_PATH");
  }
  if (handle() == nullptr) return Status::error(std::string(kFile) + " finds no GPU that it can use");
#if LOCKSTEP_HIPBLASLT
  int version = 0;
  (void)CALL(GetVersion)(handle(), &version);
  return std::string("hipBLASLt ") + std::to_string(version);
#else
  const size_t version = CALL(GetVersion)();
  return std::string("cuBLASLt ") + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
#endif
}

struct BlasProduct::Impl {
  BlasProblem p;
  LT(MatmulDesc_t) product = nullptr;
  LT(MatrixLayout_t) a = nullptr, b = nullptr, y = nullptr;
  std::vector<LT(MatmulHeuristicResult_t)> found;
};

// The library's matrices lie column by column: its first operand is our b, its second our a, its result y.
BlasProduct::BlasProduct(const BlasProblem& p) : impl_(std::make_unique<Impl>()) {
  if (!blas_library()) return;
  Impl& i = *impl_;
  i.p = p;
  const auto set = [&](auto attribute, const auto& value) { (void)CALL(MatmulDescSetAttribute)(i.product, attribute, &value, sizeof value); };
  (void)CALL(MatmulDescCreate)(&i.product, BLAS_VALUE(COMPUTE_32F), TYPE_VALUE(R_32F));
  const auto operation = [](bool transposed) -> Operation { return transposed ? BLAS_VALUE(OP_T) : BLAS_VALUE(OP_N); };
  set(LT_VALUE(MATMUL_DESC_TRANSA), operation(!p.b_by_k));
  set(LT_VALUE(MATMUL_DESC_TRANSB), operation(p.a_by_k));
  if (p.dtype == DType::e4m3) {
    set(LT_VALUE(MATMUL_DESC_A_SCALE_MODE), LT_VALUE(MATMUL_MATRIX_SCALE_BLK128x128_32F));
    set(LT_VALUE(MATMUL_DESC_B_SCALE_MODE), LT_VALUE(MATMUL_MATRIX_SCALE_VEC128_32F));
    set(LT_VALUE(MATMUL_DESC_A_SCALE_POINTER), p.b_scale);
    set(LT_VALUE(MATMUL_DESC_B_SCALE_POINTER), p.a_scale);
  }
  const auto layout = [](LT(MatrixLayout_t)* made, DType t, int64_t rows, int64_t columns) {
    (void)CALL(MatrixLayoutCreate)(made, type_of(t), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
  };
  layout(&i.b, p.dtype, p.b_by_k ? p.n : p.k, p.b_by_k ? p.k : p.n);
  layout(&i.a, p.dtype, p.a_by_k ? p.m : p.k, p.a_by_k ? p.k : p.m);
  layout(&i.y, p.y_dtype, p.n, p.m);
  LT(MatmulPreference_t) preference = nullptr;
  (void)CALL(MatmulPreferenceCreate)(&preference);
  (void)CALL(MatmulPreferenceSetAttribute)(preference, LT_VALUE(MATMUL_PREF_MAX_WORKSPACE_BYTES), &p.workspace_bytes, sizeof p.workspace_bytes);
  constexpr int kMost = 16;
  i.found.resize(kMost);
  int count = 0;
  if (CALL(MatmulAlgoGetHeuristic)(handle(), i.product, i.b, i.a, i.y, i.y, preference, kMost, i.found.data(), &count) != kOk) count = 0;
  i.found.resize(static_cast<size_t>(count));
  (void)CALL(MatmulPreferenceDestroy)(preference);
}
BlasProduct::~BlasProduct() {
  if (impl_->product == nullptr) return;
  for (const auto l : {impl_->a, impl_->b, impl_->y}) (void)CALL(MatrixLayoutDestroy)(l);
  (void)CALL(MatmulDescDestroy)(impl_->product);
}
int BlasProduct::algorithms() const { return static_cast<int>(impl_->found.size()); }
bool BlasProduct::run(int algorithm, void* stream) const {
  const Impl& i = *impl_;
  const float one = 1, zero = 0;
  return CALL(Matmul)(handle(), i.product, &one, i.p.b, i.b, i.p.a, i.a, &zero, i.p.y, i.y, i.p.y, i.y, &i.found[static_cast<size_t>(algorithm)].algo, i.p.workspace,
                      i.p.workspace_bytes, static_cast<Stream>(stream)) == kOk;
}

}  // namespace lockstep::gpu

#else

namespace lockstep::gpu {

Result<std::string> blas_library() { return Status::error("built without cuBLASLt and hipBLASLt"); }
struct BlasProduct::Impl {};
BlasProduct::BlasProduct(const BlasProblem&) {}
BlasProduct::~BlasProduct() = default;
int BlasProduct::algorithms() const { return 0; }
bool BlasProduct::run(int, void*) const { return false; }

}  // namespace lockstep::gpu

#endif
