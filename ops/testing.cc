#include "ops/testing.h"

#include <hwy/targets.h>

#include <cmath>
#include <cstring>

#include "core/formats.h"

namespace lockstep::testing {

Tensor::Tensor(DType dtype, Shape shape) {
  const size_t bytes = static_cast<size_t>(shape.elements()) * dtype_bytes(dtype);
  storage_ = std::make_unique<char[]>(bytes + 1);
  view_ = TensorView(storage_.get(), dtype, shape);
}

namespace {

double read(ConstTensorView v, int64_t i) {
  const int64_t row = v.shape.row_elements();
  const int64_t at = row == 0 ? 0 : i / row * v.row_stride + i % row;
  switch (v.dtype) {
    case DType::f32: return static_cast<const float*>(v.data)[at];
    case DType::bf16: return to_f32(static_cast<const bf16*>(v.data)[at]);
    case DType::f64: return static_cast<const double*>(v.data)[at];
    case DType::i32: return static_cast<const int32_t*>(v.data)[at];
    case DType::i64: return static_cast<double>(static_cast<const int64_t*>(v.data)[at]);
    case DType::u8: return static_cast<const uint8_t*>(v.data)[at];
    case DType::e4m3: return to_f32(static_cast<const e4m3*>(v.data)[at]);
    case DType::e5m2: return to_f32(static_cast<const e5m2*>(v.data)[at]);
    case DType::ue8m0: return to_f32(static_cast<const ue8m0*>(v.data)[at]);
    case DType::e2m1x2: return static_cast<const e2m1x2*>(v.data)[at].bits;  // two numbers: the byte
  }
  return 0;
}

}  // namespace

float Tensor::get(int64_t i) const { return static_cast<float>(read(view_, i)); }

void Tensor::set(int64_t i, double value) {
  switch (view_.dtype) {
    case DType::f32: ptr<float>()[i] = static_cast<float>(value); return;
    case DType::bf16: ptr<bf16>()[i] = to_bf16(static_cast<float>(value)); return;
    case DType::f64: ptr<double>()[i] = value; return;
    case DType::i32: ptr<int32_t>()[i] = static_cast<int32_t>(value); return;
    default: CHECK(false, "set on {}", dtype_name(view_.dtype));
  }
}

Tensor random_tensor(uint64_t seed, DType dtype, Shape shape, float magnitude) {
  Tensor t(dtype, shape);
  Philox rng(seed, RngPurpose::test);
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, (2.0f * rng.uniform() - 1.0f) * magnitude);
  return t;
}

Tensor random_ints(uint64_t seed, Shape shape, int32_t below) {
  Tensor t(DType::i32, shape);
  Philox rng(seed, RngPurpose::test, 1);
  for (int64_t i = 0; i < t.elements(); ++i) t.ptr<int32_t>()[i] = static_cast<int32_t>(rng.below(static_cast<uint32_t>(below)));
  return t;
}

Tensor int_tensor(const std::vector<int32_t>& values) {
  Tensor t(DType::i32, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) t.ptr<int32_t>()[i] = values[i];
  return t;
}

Tensor to_dtype(ConstTensorView x, DType dtype) {
  Tensor t(dtype, x.shape);
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, read(x, i));
  return t;
}

int64_t count_bit_differences(ConstTensorView a, ConstTensorView b) {
  CHECK(a.dtype == b.dtype && a.shape == b.shape, "{} {} against {} {}", dtype_name(a.dtype), a.shape.str(),
        dtype_name(b.dtype), b.shape.str());
  const size_t element = dtype_bytes(a.dtype);
  const int64_t row = a.shape.row_elements();
  int64_t different = 0;
  for (int64_t r = 0; r < a.rows(); ++r)
    for (int64_t i = 0; i < row; ++i)
      different += std::memcmp(static_cast<const char*>(a.data) + static_cast<size_t>(r * a.row_stride + i) * element,
                               static_cast<const char*>(b.data) + static_cast<size_t>(r * b.row_stride + i) * element,
                               element) != 0;
  return different;
}

double max_abs_difference(ConstTensorView a, ConstTensorView b) {
  CHECK(a.shape == b.shape, "{} against {}", a.shape.str(), b.shape.str());
  double worst = 0;
  for (int64_t i = 0; i < a.shape.elements(); ++i) {
    const double d = std::abs(read(a, i) - read(b, i));
    if (!(d <= worst)) worst = d;  // keeps NaN
  }
  return worst;
}

double relative_l2(ConstTensorView a, ConstTensorView b) {
  CHECK(a.shape == b.shape, "{} against {}", a.shape.str(), b.shape.str());
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < a.shape.elements(); ++i) {
    const double x = read(a, i), y = read(b, i);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

void for_each_simd_target(const std::function<void(const std::string& target)>& f) {
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    f(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
}

int num_simd_targets() {
  hwy::SetSupportedTargetsForTest(0);
  return static_cast<int>(hwy::SupportedAndGeneratedTargets().size());
}

double finite_difference(const std::function<double()>& f, Tensor& x, int64_t i, double h) {
  const float kept = x.ptr<float>()[i];
  x.ptr<float>()[i] = static_cast<float>(kept + h);
  const double up = f(), x_up = x.ptr<float>()[i];
  x.ptr<float>()[i] = static_cast<float>(kept - h);
  const double down = f(), x_down = x.ptr<float>()[i];
  x.ptr<float>()[i] = kept;
  return (up - down) / (x_up - x_down);
}

}  // namespace lockstep::testing
