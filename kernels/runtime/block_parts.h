// What the blocks share inside: how rows are cut into spans, and spans shared among threads.
#pragma once

#include "blocks.h"
#include "gemm.h"

namespace mrem::runtime {

// A span has about so many rows: enough that unpacking a weight costs little against multiplying by it, few
// enough that all its codes stay in the second cache.
constexpr std::size_t kSpanRows = 128;

// Fewer rows are not worth unpacking all weights once more for them.
constexpr std::size_t kPartRows = 48;

// How many spans to make of rows that are independent: a multiple of the threads, if that leaves enough rows
// in each. A thread then does every stage for its own rows, and their codes stay in its own cache.
std::size_t spans_of_rows(std::size_t rows, std::size_t threads);

// Whole sequences, about kSpanRows rows in each span.
std::vector<Span> spans_of(const Tokens& tokens);

// Whether that many equal tasks keep the threads busy to the end.
bool worth_sharing_whole(std::size_t tasks, std::size_t threads);

// Zeros in the rows whose mask is 0.
void clear_padding(const std::int64_t* mask, std::size_t rows, std::size_t width, float* y);

// Rows [first, last) of y, at `index`: LayerNorm of row i of `sums`, `stride` apart, + row index[i] of
// `hidden`.
struct NormOf {
    const float *gamma, *beta;
    float epsilon;
};
void norm_rows(const FloatKernels& floats, const float* sums, std::size_t stride, const float* hidden,
               const std::uint32_t* index, std::size_t first, std::size_t last, std::size_t width,
               const NormOf& norm, float* y);

// body(span, pool): spans side by side, each in one thread, if that keeps all of them busy; else one after
// the other, each shared by all threads.
template <class Body>
void for_spans(Pool& pool, std::size_t spans, const Body& body) {
    if (worth_sharing_whole(spans, pool.threads())) {
        share(pool, spans, [&](std::size_t span) {
            OneThread alone;
            body(span, static_cast<Pool&>(alone));
        });
        return;
    }
    for (std::size_t span = 0; span < spans; ++span) body(span, pool);
}

// body(first, last, pool) for spans of rows that are independent.
template <class Body>
void by_spans(Pool& pool, std::size_t rows, const Body& body) {
    const std::size_t spans = spans_of_rows(rows, pool.threads());
    for_spans(pool, spans, [&](std::size_t span, Pool& inner) {
        body(rows * span / spans, rows * (span + 1) / spans, inner);
    });
}

// body(first, last) for runs of rows, shared by the threads.
template <class Body>
void by_rows(Pool& pool, std::size_t rows, const Body& body) {
    const std::size_t tasks = rows < 4 * pool.threads() ? 1 : pool.threads();
    share(pool, tasks, [&](std::size_t task) { body(rows * task / tasks, rows * (task + 1) / tasks); });
}

}  // namespace mrem::runtime
