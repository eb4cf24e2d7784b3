// The contract is in gemm.h.
//
// The order: a few panels (as many as a tile is wide), a block of K of these unpacked into the first cache,
// then all rows, tile after tile. Sums of several blocks of K wait in an array of all rows by these panels.
#include "gemm.h"

#include <algorithm>
#include <cstring>

#include "prefetch.h"

namespace mrem::runtime {
namespace {

// A block of K for some panels, as signed bytes. Above 16 quads, AMX wants whole groups of them.
void unpack(const GemmKernels& kernels, const Weights& weights, std::size_t panel, std::size_t count,
            std::size_t first, std::size_t quads, std::size_t padded, std::int8_t* b) {
    const std::size_t per_step = fields(weights.coding().bits);
    for (std::size_t p = 0; p < count; ++p, b += padded * kStepBytes) {
        kernels.unpack(weights.codes(panel + p, first), quads / per_step, weights.coding(), b);
        std::memset(b + quads * kStepBytes, 0, (padded - quads) * kStepBytes);
    }
}

// The codes that the next block reads, `first` of some panels and the same of those beside it.
struct Next {
    const std::uint8_t* codes;
    std::size_t panels, bytes;
};

Next next_of(const Weights& weights, std::size_t panel, std::size_t count, std::size_t first,
             std::size_t quads, std::size_t all, std::size_t last) {
    const std::size_t per_step = fields(weights.coding().bits);
    const bool further = first + quads < all;
    const std::size_t next = further ? panel : panel + count, at = further ? first + quads : 0;
    return {weights.codes(next, at), std::min(count, last - next),
            std::min(quads, all - at) / per_step * kStepBytes};
}

// While the tiles of a block run, the codes of the next one come from memory, a share of them before each
// tile. Codes are read once per call, so they need no place in the caches afterwards.
class Ahead {
  public:
    Ahead(const Next& next, std::size_t stride, std::size_t tiles)
        : next_(next), stride_(stride), share_(round_up(ceil_div(next.bytes, tiles), 64)) {}
    void some() {
        const std::size_t end = std::min(next_.bytes, done_ + share_);
        for (std::size_t p = 0; p < next_.panels; ++p) {
            for (std::size_t at = done_; at < end; at += 64) {
                prefetch<false>(next_.codes + p * stride_ + at);
            }
        }
        done_ = end;
    }
    void nothing() { done_ = next_.bytes; }

  private:
    Next next_;
    std::size_t stride_, share_, done_ = 0;
};

}  // namespace

void quantize_rows(const FloatKernels& floats, const float* x, const std::uint32_t* index, std::size_t first,
                   std::size_t last, const Grid& grid, const CodeRows& codes) {
    for (std::size_t row = first; row < last; ++row) {
        std::uint8_t* to = codes.codes + row * codes.stride;
        const std::size_t source = index != nullptr ? index[row] : row;
        floats.quantize(x + source * codes.width, codes.width, grid, to);
        std::memset(to + codes.width, 0, codes.stride - codes.width);
    }
}

void clear_ends(const CodeRows& codes, std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row) {
        std::memset(codes.codes + row * codes.stride + codes.width, 0, codes.stride - codes.width);
    }
}

void FloatSink::take(const Sums& sums) {
    float* y = y_ + sums.row * stride_ + sums.column();
    const std::size_t columns = sums.columns(), whole = sums.panels * kPanel;
    if (padded_ || columns == whole) {
        sums.to(y, stride_);
        return;
    }
    alignas(kAlignment) float tile[kMostTile];
    sums.to(tile, whole);
    for (std::size_t row = 0; row < sums.rows; ++row) {
        std::memcpy(y + row * stride_, tile + row * whole, columns * sizeof(float));
    }
}

void CodeSink::take(const Sums& sums) {
    const std::size_t begin = sums.column(), end = begin + sums.columns();
    std::uint8_t* to = codes_ + sums.row * stride_ + begin;
    const auto same_grid = [&](std::size_t from, std::size_t until) {
        return from / section_ == (until - 1) / section_;
    };
    if (same_grid(begin, end)) {
        floats_.quantize_sums(sums.rows_of(0, end - begin), grids_[begin / section_], gelu_, to, stride_);
        return;
    }
    for (std::size_t panel = 0; panel < sums.panels; ++panel) {
        const std::size_t first = begin + panel * kPanel, last = std::min(end, first + kPanel);
        const SumRows rows = sums.rows_of(panel, last - first);
        if (same_grid(first, last)) {
            floats_.quantize_sums(rows, grids_[first / section_], gelu_, to + panel * kPanel, stride_);
            continue;
        }
        for (std::size_t column = first;
             column < last;) {  // the panel with each grid, of which a part is kept
            alignas(kAlignment) std::uint8_t codes[kMostTile];
            const std::size_t next = std::min(last, (column / section_ + 1) * section_);
            floats_.quantize_sums(rows, grids_[column / section_], gelu_, codes, kPanel);
            for (std::size_t row = 0; row < sums.rows; ++row) {
                std::memcpy(to + row * stride_ + (column - begin), codes + row * kPanel + (column - first),
                            next - column);
            }
            column = next;
        }
    }
}

void multiply(const Target& target, const Weights& weights, const CodeRows& x, std::size_t first,
              std::size_t last, Sink& sink) {
    const GemmKernels& kernels = *target.gemm;
    const int bits = weights.coding().bits;
    const bool wide = widened(kernels, bits);
    const std::size_t most = panels_of(kernels, bits), width = most * kPanel, rows = x.rows;
    const std::size_t all = steps(weights.inputs(), bits) * fields(bits);
    const Blocks blocks = blocks_of(kernels, weights.inputs(), bits);
    Lease lease;
    Arrays arrays;
    const auto b_slot = arrays.add<std::int8_t>(width * blocks.quads * kQuad);
    const auto wide_slot = arrays.add<std::int16_t>(wide ? width * blocks.quads * kQuad : 0);
    const auto sums_slot = arrays.add<std::int32_t>(width * (blocks.count > 1 ? rows : kernels.rows));
    arrays.place(*lease);
    std::int8_t* b = arrays.at(b_slot);
    std::int32_t* all_sums = arrays.at(sums_slot);

    for (std::size_t panel = first; panel < last; panel += most) {
        const std::size_t count = std::min(most, last - panel);
        for (std::size_t block = 0; block < blocks.count; ++block) {
            const std::size_t from = block * blocks.quads, quads = std::min(blocks.quads, all - from);
            const std::size_t padded = quads > kernels.quads ? round_up(quads, kernels.quads) : quads;
            const std::uint8_t* codes = weights.codes(panel, from);
            const std::uint8_t* cuts = weights.cuts(panel, block, blocks.count);
            const Next next = next_of(weights, panel, count, from, quads, all, last);
            Ahead ahead(next, weights.panel_bytes(), ceil_div(rows, kernels.rows));
            const auto first_tile = [&](std::size_t height, const Tile& tile) {
                const Packed packed{codes, weights.panel_bytes(), weights.coding(),
                                    height < rows ? b : nullptr,
                                    next.panels == count ? static_cast<std::size_t>(next.codes - codes) : 0};
                if (kernels.tile_unpacking != nullptr &&
                    kernels.tile_unpacking(height, count, tile, packed)) {
                    return ahead.nothing();
                }
                unpack(kernels, weights, panel, count, from, quads, padded, b);
                if (wide) kernels.widen(b, count * padded, arrays.at(wide_slot));
                ahead.some();
                kernels.tile(height, count, tile);
            };
            by_tiles(rows, kernels.rows, [&](std::size_t row, std::size_t height) {
                std::int32_t* sums = all_sums + (blocks.count > 1 ? row * width : 0);
                const std::uint8_t* a = x.codes + row * x.stride + from * kQuad;
                const Tile tile{a,      x.stride,
                                b,      padded * kStepBytes,
                                padded, sums,
                                width,  block > 0,
                                cuts,   wide ? arrays.at(wide_slot) : nullptr};
                if (row == 0) {
                    first_tile(height, tile);
                } else {
                    ahead.some();
                    kernels.tile(height, count, tile);
                }
                if (block + 1 == blocks.count) {
                    sink.take({&kernels, &weights, row, height, panel, count, sums, width});
                }
            });
        }
    }
}

void multiply(const Target& target, const Weights& weights, const CodeRows& x, Pool& pool, Sink& sink) {
    const std::size_t wide = panels_of(*target.gemm, weights.coding().bits),
                      groups = ceil_div(weights.panel_count(), wide);
    const std::size_t tasks = std::min(pool.threads(), groups);
    share(pool, tasks, [&](std::size_t task) {
        const std::size_t first = groups * task / tasks * wide, last = groups * (task + 1) / tasks * wide;
        multiply(target, weights, x, first, std::min(last, weights.panel_count()), sink);
    });
}

}  // namespace mrem::runtime
