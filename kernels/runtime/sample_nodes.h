// Nodes for tests and the fuzzer: each operator with drawn shapes, attributes, weights and inputs, all of
// them valid, and what it must compute.
#pragma once

#include <functional>
#include <list>
#include <utility>

#include "fake_ort.h"
#include "operators/operator.h"
#include "reference.h"

namespace mrem::runtime::testing {

// Where numbers come from: a generator, or the fuzzer's bytes.
class Draw {
  public:
    virtual ~Draw() = default;
    virtual std::uint32_t next() = 0;
    std::size_t below(std::size_t n) { return next() % n; }
    std::size_t from(std::size_t low, std::size_t high) { return low + below(high - low + 1); }
    // 1 to `most`, small ones more often.
    std::size_t size(std::size_t most) { return from(1, (most >> below(4)) | 1); }
    bool chance(std::size_t in) { return below(in) == 0; }
    float uniform(float low, float high) {
        return low + (high - low) * static_cast<float>(next() % 65536) / 65536.0f;
    }
};

struct Sample {
    const OrtCustomOp* op = nullptr;
    OrtKernelInfo info;
    OrtKernelContext context;
    std::list<OrtValue> values;  // in the order of the inputs; they do not move
    std::vector<std::int64_t> dims;
    std::function<void(float* y)> expected;

    // The next input. A constant one is known when the kernel is made.
    template <class T>
    const T* add(ONNXTensorElementDataType type, std::vector<std::int64_t> shape,
                 const std::vector<T>& content, bool constant) {
        values.push_back(fake_ort::tensor(type, std::move(shape), content));
        if (constant) info.constants[context.inputs.size()] = &values.back();
        context.inputs.push_back(&values.back());
        return reinterpret_cast<const T*>(values.back().data.get());
    }
    const float* add_floats(std::vector<std::int64_t> shape, Draw& draw, float low, float high,
                            bool constant) {
        std::size_t count = 1;
        for (const std::int64_t dim : shape) count *= static_cast<std::size_t>(dim);
        std::vector<float> content(count);
        for (float& x : content) x = draw.uniform(low, high);
        return add(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, std::move(shape), content, constant);
    }
    const std::int64_t* add_ids(std::vector<std::int64_t> shape, Draw& draw, std::size_t rows) {
        std::size_t count = 1;
        for (const std::int64_t dim : shape) count *= static_cast<std::size_t>(dim);
        std::vector<std::int64_t> content(count);
        for (std::int64_t& id : content) id = static_cast<std::int64_t>(draw.below(rows));
        return add(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, std::move(shape), content, false);
    }
    void add_nothing() { context.inputs.push_back(nullptr); }
};

struct Coding {
    int bits, spacing, low;
};

inline Coding draw_coding(Sample& sample, const std::string& prefix, Draw& draw) {
    static const Coding all[] = {{2, 1, -1}, {2, 2, -3}, {4, 1, -8}, {8, 1, -128}};
    const Coding coding = all[draw.below(4)];
    sample.info.integers[prefix + "bits"] = coding.bits;
    sample.info.integers[prefix + "spacing"] = coding.spacing;
    sample.info.integers[prefix + "low"] = coding.low;
    return coding;
}

inline Grid draw_grid(Sample& sample, const std::string& name, Draw& draw) {
    static const Grid all[] = {{0.03f, 128, 0, 255}, {0.1f, 128, 121, 135}, {1.0f / 255, 0, 0, 255},
                               {0.02f, 9, 0, 255},   {0.01f, 128, 1, 255},  {0.2f, 200, 7, 201}};
    const Grid grid = all[draw.below(6)];
    sample.info.floats[name + "_scale"] = grid.scale;
    sample.info.integers[name + "_zero_point"] = grid.zero_point;
    sample.info.integers[name + "_min"] = grid.low;
    sample.info.integers[name + "_max"] = grid.high;
    return grid;
}

// The three inputs of a matrix and its attributes; `title` is empty or ends with "_".
inline Weight draw_weight(Sample& sample, const std::string& title, std::size_t in, std::size_t out,
                          Draw& draw) {
    const Coding coding = draw_coding(sample, title, draw);
    sample.info.integers[title + "in"] = static_cast<std::int64_t>(in);
    sample.info.integers[title + "out"] = static_cast<std::int64_t>(out);
    Weight weight{nullptr, nullptr, nullptr, in, out, coding.bits, coding.spacing, coding.low};
    std::vector<std::uint8_t> codes(packed_bytes(in, out, coding.bits));
    const std::size_t lowest = coding.bits == 2 ? 0 : 1, highest = (std::size_t{1} << coding.bits) - 1;
    const int extreme = static_cast<int>(draw.below(4));  // now and then all at one end: the largest sums
    for (std::size_t k = 0; k < in; ++k) {
        for (std::size_t n = 0; n < out; ++n) {
            const Place place = place_of(k, n, in, coding.bits);
            const std::size_t code = extreme == 0   ? highest
                                     : extreme == 1 ? lowest
                                                    : draw.from(lowest, highest);
            codes[place.byte] = static_cast<std::uint8_t>(codes[place.byte] | code << place.shift);
        }
    }
    const auto width = static_cast<std::int64_t>(out);
    weight.codes = sample.add(
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        {static_cast<std::int64_t>(panels(out)), static_cast<std::int64_t>(steps(in, coding.bits)), 64},
        codes, true);
    weight.scale = sample.add_floats({width}, draw, 0.001f, 0.03f, true);
    weight.bias = sample.add_floats({width}, draw, -1.0f, 1.0f, true);
    return weight;
}

inline void draw_mask(Sample& sample, std::vector<std::int64_t> shape, Draw& draw) {
    const std::size_t kind = draw.below(4), batch = static_cast<std::size_t>(shape[0]),
                      tokens = static_cast<std::size_t>(shape[1]);
    std::vector<std::int64_t> mask(batch * tokens, 1);
    for (std::size_t b = 0; b < batch; ++b) {
        const std::size_t length = draw.below(tokens + 1);
        for (std::size_t t = 0; t < tokens; ++t) {
            const bool real = kind == 0 || (kind == 1   ? t < length
                                            : kind == 2 ? t >= length
                                                        : draw.below(3) != 0);
            mask[b * tokens + t] = real ? 1 - 2 * static_cast<std::int64_t>(kind == 3) : 0;
        }
    }
    sample.add(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, std::move(shape), mask, false);
}

// hidden and mask of a block; (batch, tokens), now and then empty.
inline std::pair<std::size_t, std::size_t> draw_hidden(Sample& sample, std::size_t hidden, Draw& draw) {
    // Now and then more rows than one task takes.
    const std::size_t batch = draw.chance(16)   ? 0
                              : draw.chance(32) ? draw.from(12, 30)
                                                : draw.from(1, 3),
                      tokens = draw.chance(16) ? 0 : draw.from(1, 21);
    const auto b = static_cast<std::int64_t>(batch), t = static_cast<std::int64_t>(tokens);
    sample.dims = {b, t, static_cast<std::int64_t>(hidden)};
    sample.add_floats(sample.dims, draw, -3.0f, 3.0f, false);
    draw_mask(sample, {b, t}, draw);
    return {batch, tokens};
}

inline const float* input_floats(const Sample& sample, std::size_t i) {
    return reinterpret_cast<const float*>(sample.context.inputs[i]->data.get());
}
inline const std::int64_t* input_ids(const Sample& sample, std::size_t i) {
    return reinterpret_cast<const std::int64_t*>(sample.context.inputs[i]->data.get());
}

inline void draw_linear(Sample& sample, Draw& draw) {
    static const OrtCustomOp* const op = new_low_bit_linear(3);
    sample.op = op;
    const std::size_t in = draw.size(140), out = draw.size(40), rows = draw.chance(16) ? 0 : draw.from(1, 9);
    const auto count = static_cast<std::int64_t>(rows), width = static_cast<std::int64_t>(in);
    const bool three = draw.chance(2);
    sample.dims = {count, static_cast<std::int64_t>(out)};
    if (three) sample.dims.insert(sample.dims.begin(), 1);
    sample.add_floats(
        three ? std::vector<std::int64_t>{1, count, width} : std::vector<std::int64_t>{count, width}, draw,
        -3.0f, 3.0f, false);
    const Grid x = draw_grid(sample, "x", draw);
    const Weight weight = draw_weight(sample, "", in, out, draw);
    sample.expected = [=, &sample](float* y) {
        reference_linear(weight, x, input_floats(sample, 0), rows, y);
    };
}

inline void draw_attention(Sample& sample, Draw& draw) {
    static const OrtCustomOp* const op = new_attention_block(3);
    sample.op = op;
    AttentionShape shape{};
    shape.heads = draw.from(1, 3);
    shape.hidden = shape.heads * draw.size(40);
    const auto [batch, tokens] = draw_hidden(sample, shape.hidden, draw);
    shape.integers = !draw.chance(4);
    shape.x = draw_grid(sample, "x", draw);
    shape.o = draw_grid(sample, "o", draw);
    if (shape.integers) {
        shape.q = draw_grid(sample, "q", draw);
        shape.k = draw_grid(sample, "k", draw);
        shape.p = draw_grid(sample, "p", draw);
        shape.v = draw_grid(sample, "v", draw);
        sample.info.floats["q_scaled"] = shape.q_scaled = draw.uniform(0.001f, 0.02f);
    }
    sample.info.texts["attention"] = shape.integers ? "int8" : "float";
    sample.info.integers["heads"] = static_cast<std::int64_t>(shape.heads);
    sample.info.floats["scaling"] = shape.scaling = draw.uniform(0.1f, 1.0f);
    sample.info.floats["epsilon"] = shape.epsilon = 1e-5f;
    shape.qkv = draw_weight(sample, "qkv_", shape.hidden, 3 * shape.hidden, draw);
    shape.out = draw_weight(sample, "out_", shape.hidden, shape.hidden, draw);
    const auto width = static_cast<std::int64_t>(shape.hidden);
    shape.gamma = sample.add_floats({width}, draw, 0.5f, 1.5f, true);
    shape.beta = sample.add_floats({width}, draw, -0.5f, 0.5f, true);
    sample.expected = [=, b = batch, t = tokens, &sample](float* y) {
        reference_attention(shape, input_floats(sample, 0), input_ids(sample, 1), b, t, y);
    };
}

inline void draw_feed_forward(Sample& sample, Draw& draw) {
    static const OrtCustomOp* const op = new_feed_forward_block(3);
    sample.op = op;
    FeedForwardShape shape{};
    shape.hidden = draw.size(70);
    shape.middle = draw.size(140);
    const auto [batch, tokens] = draw_hidden(sample, shape.hidden, draw);
    shape.x = draw_grid(sample, "x", draw);
    shape.m = draw_grid(sample, "m", draw);
    sample.info.floats["epsilon"] = shape.epsilon = 1e-12f;
    shape.up = draw_weight(sample, "up_", shape.hidden, shape.middle, draw);
    shape.down = draw_weight(sample, "down_", shape.middle, shape.hidden, draw);
    const auto width = static_cast<std::int64_t>(shape.hidden);
    shape.gamma = sample.add_floats({width}, draw, 0.5f, 1.5f, true);
    shape.beta = sample.add_floats({width}, draw, -0.5f, 0.5f, true);
    sample.expected = [=, b = batch, t = tokens, &sample](float* y) {
        reference_feed_forward(shape, input_floats(sample, 0), input_ids(sample, 1), b, t, y);
    };
}

// One row of the embedding, written again: no table of bytes, no blocks.
struct PlainEmbedding {
    Coding coding;
    std::size_t width, hot_rows;
    const std::uint8_t *codes, *place8;
    const std::uint16_t* place16;
    const std::int8_t* hot_codes;
    const float *scale, *positions, *types, *gamma, *beta, *hot_scale;

    void row(std::size_t id, std::size_t position, std::size_t type, float* y) const {
        const std::size_t bits = static_cast<std::size_t>(coding.bits), row_bytes = (width * bits + 7) / 8;
        for (std::size_t j = 0; j < width; ++j) {
            const int u = codes[id * row_bytes + j * bits / 8] >> (j * bits % 8) & ((1 << bits) - 1);
            float value = static_cast<float>(coding.spacing * u + coding.low) * scale[id];
            if (hot_rows != 0) {
                const std::size_t place = place8 != nullptr ? place8[id] : place16[id];
                if (place != 0) value += static_cast<float>(hot_codes[place * width + j]) * hot_scale[place];
            }
            if (types != nullptr) value += types[type * width + j];
            y[j] = value;
        }
        layer_norm(kScalarFloats, y, positions + position * width, width, gamma, beta, 1e-5f, y);
    }
};

inline void draw_embedding(Sample& sample, Draw& draw) {
    static const OrtCustomOp* const op = new_packed_embedding(3);
    sample.op = op;
    PlainEmbedding plain{};
    plain.width = draw.size(50);
    const std::size_t vocabulary = draw.from(1, 20), positions = draw.from(1, 24), types = draw.below(3);
    const std::size_t batch = draw.chance(16) ? 0 : draw.from(1, 3),
                      tokens = draw.chance(16) ? 0 : draw.from(1, 40);
    const auto b = static_cast<std::int64_t>(batch), t = static_cast<std::int64_t>(tokens);
    const auto width = static_cast<std::int64_t>(plain.width), v = static_cast<std::int64_t>(vocabulary);
    sample.dims = {b, t, width};
    sample.add_ids({b, t}, draw, vocabulary);
    draw_mask(sample, {b, t}, draw);
    const bool shared = draw.chance(2), typed = types != 0 && draw.chance(2);
    sample.add_ids({shared ? 1 : b, t}, draw, positions);
    if (typed) {
        sample.add_ids({b, t}, draw, types);
    } else {
        sample.add_nothing();
    }
    plain.coding = draw_coding(sample, "", draw);
    sample.info.floats["epsilon"] = 1e-5f;
    const std::size_t row_bytes = (plain.width * static_cast<std::size_t>(plain.coding.bits) + 7) / 8;
    std::vector<std::uint8_t> codes(vocabulary * row_bytes);
    for (std::uint8_t& byte : codes) byte = static_cast<std::uint8_t>(draw.next());
    plain.codes = sample.add(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {v, static_cast<std::int64_t>(row_bytes)},
                             codes, true);
    plain.scale = sample.add_floats({v}, draw, 0.0f, 0.1f, true);
    plain.positions =
        sample.add_floats({static_cast<std::int64_t>(positions), width}, draw, -1.0f, 1.0f, true);
    if (types != 0) {
        plain.types = sample.add_floats({static_cast<std::int64_t>(types), width}, draw, -1.0f, 1.0f, true);
    } else {
        sample.add_nothing();
    }
    plain.gamma = sample.add_floats({width}, draw, 0.5f, 1.5f, true);
    plain.beta = sample.add_floats({width}, draw, -0.5f, 0.5f, true);
    if (draw.chance(2)) {
        plain.hot_rows = draw.from(1, 4);
        std::vector<std::uint16_t> place16(vocabulary);
        for (std::uint16_t& place : place16) place = static_cast<std::uint16_t>(draw.below(plain.hot_rows));
        if (draw.chance(2)) {
            plain.place16 = sample.add(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, {v}, place16, true);
        } else {
            const std::vector<std::uint8_t> place8(place16.begin(), place16.end());
            plain.place8 = sample.add(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {v}, place8, true);
        }
        std::vector<std::int8_t> hot(plain.hot_rows * plain.width);
        for (std::int8_t& code : hot) code = static_cast<std::int8_t>(draw.next());
        const auto rows = static_cast<std::int64_t>(plain.hot_rows);
        plain.hot_codes = sample.add(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, {rows, width}, hot, true);
        plain.hot_scale = sample.add_floats({rows}, draw, 0.0f, 0.1f, true);
    }
    sample.expected = [=, &sample](float* y) {
        for (std::size_t i = 0; i < batch * tokens; ++i) {
            if (input_ids(sample, 1)[i] == 0) {
                for (std::size_t j = 0; j < plain.width; ++j) y[i * plain.width + j] = 0.0f;
                continue;
            }
            const std::int64_t type = typed ? input_ids(sample, 3)[i] : 0;
            plain.row(static_cast<std::size_t>(input_ids(sample, 0)[i]),
                      static_cast<std::size_t>(input_ids(sample, 2)[shared ? i % tokens : i]),
                      static_cast<std::size_t>(type), y + i * plain.width);
        }
    };
}

// A node of one of the operators. `sample` must not move afterwards.
inline void draw_node(Sample& sample, Draw& draw) {
    static void (*const all[])(Sample&, Draw&) = {draw_linear, draw_attention, draw_feed_forward,
                                                  draw_embedding};
    sample.info.integers["format"] = kFormat;
    all[draw.below(4)](sample, draw);
}

// Makes the kernel and runs it, as onnxruntime does. Null if all went well, else the error, which the caller
// must release.
inline OrtStatus* run_node(Sample& sample) {
    void* kernel = nullptr;
    if (OrtStatus* problem = sample.op->CreateKernelV2(sample.op, &fake_ort::api(), &sample.info, &kernel)) {
        if (kernel != nullptr) std::abort();
        return problem;
    }
    OrtStatus* problem = sample.op->KernelComputeV2(kernel, &sample.context);
    sample.op->KernelDestroy(kernel);
    return problem;
}

}  // namespace mrem::runtime::testing
