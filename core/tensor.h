#pragma once
// Shapes and non-owning views. A view never outlives the arena or mapping it points into; it is passed by value.
//
// Layout: row-major; everything below dimension 0 is contiguous, and consecutive indices of dimension 0 are
// `row_stride` elements apart. A view of a column block of a wider matrix therefore costs nothing (cols()).

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/status.h"

namespace lockstep {

struct Shape {
  static constexpr int kMaxRank = 4;
  std::array<int64_t, kMaxRank> dims{};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> d) {
    CHECK(d.size() <= kMaxRank, "rank {} over {}", d.size(), kMaxRank);
    for (int64_t x : d) dims[rank++] = x;
  }
  int64_t operator[](int i) const { return dims[i]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return rank == 0 ? 0 : n;
  }
  int64_t row_elements() const {  // elements of one index of dimension 0
    int64_t n = 1;
    for (int i = 1; i < rank; ++i) n *= dims[i];
    return n;
  }
  bool operator==(const Shape& o) const {
    if (rank != o.rank) return false;
    for (int i = 0; i < rank; ++i)
      if (dims[i] != o.dims[i]) return false;
    return true;
  }
  std::string str() const {
    std::string s = "[";
    for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(dims[i]);
    return s + "]";
  }
};

// Void is void or const void.
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;
  int64_t row_stride = 0;  // elements between consecutive indices of dimension 0

  BasicTensorView() = default;
  BasicTensorView(Void* data, DType dtype, Shape shape)
      : data(data), dtype(dtype), shape(shape), row_stride(shape.row_elements()) {}
  BasicTensorView(Void* data, DType dtype, Shape shape, int64_t row_stride)
      : data(data), dtype(dtype), shape(shape), row_stride(row_stride) {}
  // A mutable view is usable wherever a const one is.
  template <typename Other>
    requires(!std::is_same_v<Void, Other> && std::is_convertible_v<Other*, Void*>)
  BasicTensorView(const BasicTensorView<Other>& o)
      : data(o.data), dtype(o.dtype), shape(o.shape), row_stride(o.row_stride) {}

  bool empty() const { return data == nullptr || shape.elements() == 0; }
  int64_t rows() const { return shape.rank == 0 ? 0 : shape[0]; }
  int64_t dim(int i) const { return shape[i]; }
  bool contiguous() const { return rows() <= 1 || row_stride == shape.row_elements(); }
  size_t bytes() const { return static_cast<size_t>(shape.elements()) * dtype_bytes(dtype); }

  template <typename T>
  using Pointer = std::conditional_t<std::is_const_v<Void>, const T*, T*>;

  template <typename T>
  Pointer<T> ptr() const {
    CHECK(dtype == DTypeOf<T>::value, "a {} view of shape {} was read as {}", dtype_name(dtype), shape.str(),
          dtype_name(DTypeOf<T>::value));
    return static_cast<Pointer<T>>(data);
  }
  template <typename T>
  Pointer<T> row(int64_t i) const { return ptr<T>() + i * row_stride; }

  // Rows [begin, begin + count).
  BasicTensorView slice(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && count >= 0 && begin + count <= rows(), "rows [{}, {}) of a view with {}", begin, begin + count,
          rows());
    BasicTensorView v = *this;
    v.data = offset(begin * row_stride);
    v.shape.dims[0] = count;
    return v;
  }
  // Columns [begin, begin + count) of a matrix; the row stride stays.
  BasicTensorView cols(int64_t begin, int64_t count) const {
    CHECK(shape.rank == 2 && begin >= 0 && begin + count <= shape[1], "columns [{}, {}) of {}", begin, begin + count,
          shape.str());
    return BasicTensorView(offset(begin), dtype, {shape[0], count}, row_stride);
  }
  // Index i of dimension 0, as a view of one rank less.
  BasicTensorView at(int64_t i) const {
    CHECK(shape.rank >= 2 && i >= 0 && i < rows(), "index {} of {}", i, shape.str());
    Shape s;
    for (int k = 1; k < shape.rank; ++k) s.dims[s.rank++] = shape[k];
    return BasicTensorView(offset(i * row_stride), dtype, s);
  }
  // The same bytes in another shape; the view must be contiguous.
  BasicTensorView reshape(Shape s) const {
    CHECK(contiguous() && s.elements() == shape.elements(), "cannot view {} as {}", shape.str(), s.str());
    return BasicTensorView(data, dtype, s);
  }

 private:
  Void* offset(int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return data == nullptr ? nullptr
                           : static_cast<Byte*>(data) + elements * static_cast<int64_t>(dtype_bytes(dtype));
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

}  // namespace lockstep
