// Products of activation codes and packed weights, tile by tile, each handed to a sink while it is in the
// first cache.
#pragma once

#include "pool.h"
#include "scratch.h"
#include "weights.h"

namespace mrem::runtime {

// Activation codes, row by row. The bytes from `width` to `stride` are zeros; stride is stride_of(width).
struct CodeRows {
    std::uint8_t* codes;
    std::size_t rows, width, stride;
};
constexpr std::size_t stride_of(std::size_t width) { return round_up(width, 64); }

// Finished sums: rows [row, row + rows) and panels [panel, panel + panels).
struct Sums {
    const GemmKernels* kernels;
    const Weights* weights;
    std::size_t row, rows, panel, panels;
    const std::int32_t* sums;
    std::size_t stride;

    std::size_t column() const { return panel * kPanel; }
    // Columns that exist, without the padding of the last panel.
    std::size_t columns() const {
        const std::size_t left = weights->outputs() - column();
        return left < panels * kPanel ? left : panels * kPanel;
    }
    // Some columns, from a panel on, without those of padding.
    SumRows rows_of(std::size_t first, std::size_t count) const {
        return {sums + first * kPanel, rows, count, stride, weights->columns() + panel + first, nullptr};
    }
    // As floats into rows of `y_stride`; writes whole panels.
    void to(float* y, std::size_t y_stride) const {
        kernels->dequantize(rows, panels, sums, stride, weights->columns() + panel, y, y_stride);
    }
};

// body(first, count) for tiles of at most `most` rows. They are nearly equal: 25 rows are 12 + 8 + 5, not 12
// + 12
// + 1. All but the last are multiples of four, as many rows as float kernels work on at once, where `most`
// is.
template <class Body>
void by_tiles(std::size_t rows, std::size_t most, const Body& body) {
    const std::size_t tiles = ceil_div(rows, most), unit = most % 4 == 0 ? 4 : 1;
    std::size_t row = 0;
    for (std::size_t i = 0; i < tiles; ++i) {
        const std::size_t end = round_up(rows * (i + 1) / tiles, unit), next = end < rows ? end : rows;
        if (next > row) body(row, next - row);
        row = next;
    }
}

// Called from several threads at once, each for other rows or columns.
class Sink {
  public:
    virtual ~Sink() = default;
    virtual void take(const Sums& sums) = 0;
};

// The largest tile of any target: what a sink needs room for.
constexpr std::size_t kMostTileRows = 32, kMostTile = kMostTileRows * 64;

// y[rows][outputs], floats. `padded`: rows of y go on to the end of the last panel.
class FloatSink final : public Sink {
  public:
    FloatSink(float* y, std::size_t stride, bool padded) : y_(y), stride_(stride), padded_(padded) {}
    void take(const Sums& sums) override;

  private:
    float* y_;
    std::size_t stride_;
    bool padded_;
};

// Codes, with a grid for every `section` columns, after GELU if asked.
class CodeSink final : public Sink {
  public:
    CodeSink(const FloatKernels& floats, const Grid* grids, std::size_t section, bool gelu,
             std::uint8_t* codes, std::size_t stride)
        : floats_(floats), grids_(grids), section_(section), gelu_(gelu), codes_(codes), stride_(stride) {}
    void take(const Sums& sums) override;

  private:
    const FloatKernels& floats_;
    const Grid* grids_;
    std::size_t section_;
    bool gelu_;
    std::uint8_t* codes_;
    std::size_t stride_;
};

// x[rows][width] to codes, one call for a few rows. `index` names the rows of x, or is null for all in order.
void quantize_rows(const FloatKernels& floats, const float* x, const std::uint32_t* index, std::size_t first,
                   std::size_t last, const Grid& grid, const CodeRows& codes);

// Zeros from width to stride.
void clear_ends(const CodeRows& codes, std::size_t first, std::size_t last);

// All rows times the panels [first, last).
void multiply(const Target& target, const Weights& weights, const CodeRows& x, std::size_t first,
              std::size_t last, Sink& sink);

// All rows times all panels, shared by the threads of the pool.
void multiply(const Target& target, const Weights& weights, const CodeRows& x, Pool& pool, Sink& sink);

}  // namespace mrem::runtime
