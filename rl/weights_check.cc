#include "rl/weights_check.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/device.h"
#include "core/formats.h"
#include "ops/cast/cast.h"
#include "ops/matmul/matmul.h"

namespace lockstep {

namespace {

void ids_as_numbers(TensorView out, ConstTensorView ids) {
  std::transform(ids.ptr<int32_t>(), ids.ptr<int32_t>() + ids.shape.elements(), out.ptr<float>(), [](int32_t id) { return static_cast<float>(id); });
}

// code * scale, every code by the scale of its block.
void dequantize_by_grid(Context& c, TensorView out, ConstTensorView codes, ConstTensorView scales, const BlockGrid& row_grid, const BlockGrid& col_grid) {
  parallel_for(c, out.rows(), 4 * out.dim(1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const ue8m0* of_row = scales.row<ue8m0>(row_grid.block_of(r));
      for (int64_t k = 0; k < out.dim(1); ++k) {
        const float code = codes.dtype == DType::e4m3 ? to_f32(codes.row<e4m3>(r)[k])
                           : k % 2 == 0               ? low_to_f32(codes.row<e2m1x2>(r)[k / 2])
                                                      : high_to_f32(codes.row<e2m1x2>(r)[k / 2]);
        out.row<float>(r)[k] = code * to_f32(of_row[col_grid.block_of(k)]);
      }
    }
  });
}

}  // namespace

void served_numbers(Context& c, const Weights& served, int id, TensorView out) {
  const TensorSpec& spec = served.table()[static_cast<size_t>(id)];
  const WeightView& w = served.view(id);
  if (!w.panels.empty()) return unpack_panels(c, out.reshape(spec.weight_shape()), w);
  const ArenaScope scope(*c.host);
  CpuContext cpu;
  const ConstTensorView rows = matrix_view(on_host(c, w.rows));
  if (rows.dtype == DType::i32) {
    ids_as_numbers(out, rows);
  } else if (w.quantized()) {
    dequantize_by_grid(cpu, out, rows, matrix_view(on_host(c, w.scales)), w.row_grid, w.col_grid);
  } else {
    cast(cpu, out, rows);
  }
}

Status exported_numbers(CpuContext& cpu, const TensorSpec& spec, Numerics n, const ReadBox& masters, TensorView out) {
  Context& c = cpu;
  const ArenaScope scope(*c.workspace);
  const TensorView master = c.workspace->tensor(spec.master_dtype(), {spec.box.rows.size(), spec.box.columns.size()}, "master");
  LOCKSTEP_RETURN_IF_ERROR(masters(spec, spec.box, master));
  const DType dtype = spec.weight_dtype(n);
  if (dtype == DType::i32) {
    ids_as_numbers(out, master);
  } else if (const std::optional<QuantFormat> format = spec.quant_format(n)) {
    const TensorView codes = c.workspace->tensor(dtype, {master.rows(), num_blocks(master.dim(1), dtype == DType::e2m1x2 ? 2 : 1)}, "codes");
    const BlockGrid rows = spec.row_grid(n), columns = spec.col_grid(n);
    const TensorView scales = c.workspace->tensor(DType::ue8m0, {rows.blocks_in(master.rows()), columns.blocks_in(master.dim(1))}, "scales");
    quantize_by_grid(c, codes, scales, rows, columns, master);
    dequantize_by_grid(c, out, codes, scales, rows, columns);
  } else {
    const TensorView rounded = c.workspace->tensor(dtype, master.shape, "rounded");
    cast(c, rounded, master);
    cast(c, out, rounded);
  }
  return Status::ok();
}

std::optional<WeightDifference> first_difference(const TensorSpec& spec, int64_t row, int64_t first_column, std::span<const float> served,
                                                 std::span<const float> exported) {
  for (size_t k = 0; k < served.size(); ++k) {
    if (std::bit_cast<uint32_t>(served[k]) == std::bit_cast<uint32_t>(exported[k])) continue;
    WeightDifference d{.tensor = spec.name, .row = row, .column = first_column + static_cast<int64_t>(k), .served = served[k], .exported = exported[k]};
    if (const size_t star = spec.name.find('*'); star != std::string::npos) {
      d.tensor.replace(star, 1, std::to_string(row / spec.whole[1]));
      d.row = row % spec.whole[1];
    }
    return d;
  }
  return std::nullopt;
}

std::string WeightDifference::str() const {
  return fmt::format("{} row {}, column {}: {:.9g} serves, {:.9g} was exported (bits {:08x} and {:08x})", tensor, row, column, served, exported,
                     std::bit_cast<uint32_t>(served), std::bit_cast<uint32_t>(exported));
}

Result<WeightsComparison> compare_weights(Context& c, const Weights& served, const ReadBox& masters) {
  WeightsComparison result;
  CpuContext cpu(c.num_threads());
  for (const TensorSpec& spec : served.table()) {
    if (!spec.held()) continue;
    const ArenaScope scope(cpu.workspace());
    const Shape shape = {spec.box.rows.size(), spec.box.columns.size()};
    const TensorView serves = cpu.workspace().tensor(DType::f32, shape, "served"), exports = cpu.workspace().tensor(DType::f32, shape, "exported");
    served_numbers(c, served, spec.id, serves);
    LOCKSTEP_RETURN_IF_ERROR(exported_numbers(cpu, spec, served.numerics(), masters, exports));
    ++result.tensors;
    result.numbers += shape.elements();
    if (std::memcmp(serves.data, exports.data, serves.bytes()) == 0) continue;
    ++result.different;
    const auto row_of = [&](const TensorView& v, int64_t r) { return std::span<const float>(v.row<float>(r), static_cast<size_t>(shape[1])); };
    for (int64_t r = 0; r < shape[0] && !result.first; ++r)
      result.first = first_difference(spec, spec.box.rows.begin + r, spec.box.columns.begin, row_of(serves, r), row_of(exports, r));
  }
  return result;
}

}  // namespace lockstep
