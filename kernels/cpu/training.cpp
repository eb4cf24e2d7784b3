// The contract is in training.h; the formulas of TWN, midrise and LAQ are those of
// mrem_deploy/kernels/reference.py.
#include "training.h"

#include <algorithm>
#include <cassert>

#include "parallel.h"

namespace mrem {
namespace {

constexpr std::size_t kBlock = 16384;                     // floats: 64 KiB, a few microseconds of work
constexpr std::size_t kPastCache = std::size_t{1} << 21;  // floats: 8 MiB, more than a core's own caches
constexpr double kTwnThreshold = 0.7;                     // Δ = 0.7 · mean|w|, the constant of the TWN paper
constexpr double kMidriseStart = 0.625;                   // α₀ = 0.625 · mean|w|
constexpr int kMidriseAlternations = 2;
constexpr float kMidriseLeast = 0x1p-100f;  // α of zeros

// Rows in blocks of about kBlock floats. A contiguous tensor with one scale is one long run, cut again into
// rows of kBlock floats, of which the last may be shorter.
class Blocks {
  public:
    Blocks(const View& x, bool one_scale) : view_(x), total_(x.size()), columns_(x.columns) {
        flat_ = one_scale && x.contiguous();
        if (flat_) columns_ = kBlock;
        rows_ = (total_ + columns_ - 1) / columns_;
        rows_each_ = std::max<std::size_t>(1, kBlock / columns_);
    }

    std::size_t count() const { return (rows_ + rows_each_ - 1) / rows_each_; }

    // visit(row, from, offset, n): n floats at `from`, whose place in a contiguous tensor is `offset`.
    template <class Visit>
    void visit(std::size_t block, const Visit& visit) const {
        const std::size_t stop = std::min(rows_, (block + 1) * rows_each_);
        for (std::size_t row = block * rows_each_; row < stop; ++row) {
            const std::size_t offset = row * columns_;
            visit(row, start_of(row), offset, std::min(columns_, total_ - offset));
        }
    }

  private:
    const float* start_of(std::size_t row) const {
        if (flat_) return view_.data + row * columns_;
        const std::size_t c = row % view_.sizes[2], ab = row / view_.sizes[2];
        const std::size_t b = ab % view_.sizes[1], a = ab / view_.sizes[1];
        return view_.data + static_cast<std::ptrdiff_t>(a) * view_.strides[0] +
               static_cast<std::ptrdiff_t>(b) * view_.strides[1] +
               static_cast<std::ptrdiff_t>(c) * view_.strides[2];
    }

    View view_;
    std::size_t total_, columns_, rows_, rows_each_;
    bool flat_;
};

View matrix(const float* data, std::size_t rows, std::size_t columns) {
    const auto stride = static_cast<std::ptrdiff_t>(columns);
    return {data, {1, 1, rows}, {stride * static_cast<std::ptrdiff_t>(rows), 0, stride}, columns};
}

// The sum of part(from, offset, n) over all blocks, in their order.
template <class Sum, class Part>
Sum sum_blocks(const Blocks& blocks, int threads, const Part& part) {
    std::vector<Sum> partial(blocks.count(), Sum{});
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t, const float* from, std::size_t offset, std::size_t n) {
            partial[block] += part(from, offset, n);
        });
    });
    Sum total{};
    for (const Sum& sum : partial) total += sum;
    return total;
}

// Plain sums that can be added.
struct Kept : KeptSum {
    Kept& operator+=(const KeptSum& more) {
        sum += more.sum;
        count += more.count;
        return *this;
    }
};

struct Laq : LaqSums {
    Laq& operator+=(const LaqSums& more) {
        numerator += more.numerator;
        denominator += more.denominator;
        return *this;
    }
};

float twn_threshold(double magnitudes, std::size_t count) {
    return static_cast<float>(kTwnThreshold * magnitudes / static_cast<double>(count));
}

// The mean of |w| above the threshold; 1 if there is none.
float twn_scale(const KeptSum& kept) {
    return kept.count > 0 ? static_cast<float>(kept.sum / kept.count) : 1.0f;
}

// A scale of the midrise grid; NaN stays NaN.
float midrise_scale(double numerator, double denominator) {
    const float found = static_cast<float>(numerator / denominator);
    return found < kMidriseLeast ? kMidriseLeast : found;
}

// α = Σ|w|q / Σq² with q = 3 where |w| > 2α and 1 elsewhere. `sum_above(Δ)` gives the sum and the number of
// those |w| that exceed Δ: they count twice more in the numerator, and eight times more in the denominator.
template <class SumAbove>
float midrise_alternations(double magnitudes, std::size_t count, const SumAbove& sum_above) {
    const auto all = static_cast<double>(count);
    float alpha = midrise_scale(kMidriseStart * magnitudes, all);
    for (int i = 0; i < kMidriseAlternations; ++i) {
        const KeptSum above = sum_above(2.0f * alpha);
        alpha = midrise_scale(magnitudes + 2.0 * above.sum, all + 8.0 * above.count);
    }
    return alpha;
}

// α₀ = start · mean|w|; start alone for a row of zeros.
float laq_start(float start, double magnitudes, std::size_t count) {
    const float mean = static_cast<float>(magnitudes / static_cast<double>(count));
    return start * (mean > 0 ? mean : 1.0f);
}

// ΣD·w·b / ΣD·b², or the last α if that is not positive.
float laq_next(const LaqSums& sums, float alpha) {
    const bool usable = sums.denominator > 0 && sums.numerator > 0;
    return usable ? static_cast<float>(sums.numerator / sums.denominator) : alpha;
}

}  // namespace

bool View::contiguous() const {
    auto expected = static_cast<std::ptrdiff_t>(columns);
    for (std::size_t i = sizes.size(); i-- > 0;) {
        if (sizes[i] != 1 && strides[i] != expected) return false;
        expected *= static_cast<std::ptrdiff_t>(sizes[i]);
    }
    return true;
}

void quantize(const Kernels& kernels, const View& x, Scales scales, Range range, bool dequantize, float* out,
              int threads) {
    assert(scales.count == 1 || (scales.count == x.rows() && x.contiguous()));
    const Blocks blocks(x, scales.count == 1);
    const bool past_cache = x.size() >= kPastCache;
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t offset, std::size_t n) {
            const float scale = scales.at(row);
            kernels.quantize(from, n, scale, range, dequantize ? scale : 1.0f, past_cache, out + offset);
        });
    });
}

void quantize_backward(const Kernels& kernels, const float* grad, const View& x, Scales scales, Range range,
                       float* grad_x, float* grad_scale, int threads) {
    assert(scales.count == 1 || (scales.count == x.rows() && x.contiguous()));
    const Blocks blocks(x, scales.count == 1);
    const bool past_cache = x.size() >= kPastCache && grad_x != grad;  // in place, it is in the cache
    if (scales.count == 1) {
        const auto part = [&](const float* from, std::size_t offset, std::size_t n) {
            return kernels.quantize_backward(grad + offset, from, n, scales.at(0), range, past_cache,
                                             grad_x + offset);
        };
        *grad_scale = static_cast<float>(sum_blocks<double>(blocks, threads, part));
        return;
    }
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t offset, std::size_t n) {
            grad_scale[row] = static_cast<float>(kernels.quantize_backward(
                grad + offset, from, n, scales.at(row), range, past_cache, grad_x + offset));
        });
    });
}

void quantize_by_threshold(const Kernels& kernels, const View& w, Scales thresholds, Levels levels,
                           const float* factors, float* out, int threads) {
    assert(thresholds.count == 1 || (thresholds.count == w.rows() && w.contiguous()));
    const Blocks blocks(w, thresholds.count == 1);
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t offset, std::size_t n) {
            const float factor = factors == nullptr ? 1.0f : factors[thresholds.count == 1 ? 0 : row];
            kernels.quantize_by_threshold(from, n, thresholds.at(row), levels, factor, out + offset);
        });
    });
}

void scale_product(const Kernels& kernels, float* product, std::size_t rows, std::size_t columns,
                   const float* scales, bool one_scale, const float* bias, int threads) {
    const Blocks blocks(matrix(product, rows, columns), one_scale && bias == nullptr);
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t, const float*, std::size_t offset, std::size_t n) {
            kernels.scale_product(product + offset, n, scales, one_scale, bias);
        });
    });
}

void twn(const Kernels& kernels, const float* w, std::size_t rows, std::size_t columns, bool per_row,
         float* threshold, float* scale, int threads) {
    const Blocks blocks(matrix(w, rows, columns), !per_row);
    if (!per_row) {
        const double magnitudes = sum_blocks<double>(
            blocks, threads,
            [&](const float* from, std::size_t, std::size_t n) { return kernels.sum_magnitudes(from, n); });
        const float delta = *threshold = twn_threshold(magnitudes, rows * columns);
        *scale =
            twn_scale(sum_blocks<Kept>(blocks, threads, [&](const float* from, std::size_t, std::size_t n) {
                return kernels.sum_above(from, n, delta);
            }));
        return;
    }
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t, std::size_t n) {
            threshold[row] = twn_threshold(kernels.sum_magnitudes(from, n), n);
            scale[row] = twn_scale(kernels.sum_above(from, n, threshold[row]));
        });
    });
}

void midrise(const Kernels& kernels, const float* w, std::size_t rows, std::size_t columns, bool per_row,
             float* threshold, float* scale, int threads) {
    const Blocks blocks(matrix(w, rows, columns), !per_row);
    if (!per_row) {
        const double magnitudes = sum_blocks<double>(
            blocks, threads,
            [&](const float* from, std::size_t, std::size_t n) { return kernels.sum_magnitudes(from, n); });
        *scale = midrise_alternations(magnitudes, rows * columns, [&](float delta) {
            return sum_blocks<Kept>(blocks, threads, [&](const float* from, std::size_t, std::size_t n) {
                return kernels.sum_above(from, n, delta);
            });
        });
        *threshold = 2.0f * *scale;
        return;
    }
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t, std::size_t n) {
            scale[row] = midrise_alternations(kernels.sum_magnitudes(from, n), n,
                                              [&](float delta) { return kernels.sum_above(from, n, delta); });
            threshold[row] = 2.0f * scale[row];
        });
    });
}

void laq(const Kernels& kernels, const float* w, const float* start, const float* diagonal, std::size_t rows,
         std::size_t columns, Range range, int iterations, bool per_row, float* scale, int threads) {
    const Blocks blocks(matrix(w, rows, columns), !per_row);
    const auto sums = [&](const float* from, std::size_t offset, std::size_t n, float alpha) {
        return kernels.laq_sums(from, diagonal == nullptr ? nullptr : diagonal + offset, n, alpha, range);
    };
    if (!per_row) {
        const double magnitudes = sum_blocks<double>(
            blocks, threads,
            [&](const float* from, std::size_t, std::size_t n) { return kernels.sum_magnitudes(from, n); });
        float alpha = laq_start(start[0], magnitudes, rows * columns);
        for (int i = 0; i < iterations; ++i) {
            const Laq found =
                sum_blocks<Laq>(blocks, threads, [&](const float* from, std::size_t offset, std::size_t n) {
                    return sums(from, offset, n, alpha);
                });
            alpha = laq_next(found, alpha);
        }
        *scale = alpha;
        return;
    }
    for_each_block(blocks.count(), threads, [&](std::size_t block) {
        blocks.visit(block, [&](std::size_t row, const float* from, std::size_t offset, std::size_t n) {
            float alpha = laq_start(start[row], kernels.sum_magnitudes(from, n), n);
            for (int i = 0; i < iterations; ++i) alpha = laq_next(sums(from, offset, n, alpha), alpha);
            scale[row] = alpha;
        });
    });
}

}  // namespace mrem
