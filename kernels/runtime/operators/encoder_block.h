// What AttentionBlock and FeedForwardBlock have in common: inputs hidden (B, T, H) and mask (B, T), then two
// matrices, gamma and beta; the output is (B, T, H).
#pragma once

#include "operator.h"

namespace mrem::runtime {

constexpr std::int64_t kMostHidden = static_cast<std::int64_t>(kMostInputs);

constexpr std::size_t kMostTokens = 0x7fffffff;  // of all examples together: blocks count rows in 32 bits

constexpr Port kEncoderBlockInputs[] = {
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
};

// `check(mask, batch, tokens)` may refuse what the others need not know.
template <class Block, class Check>
void run_block(const Call& call, Pool& pool, const Block& block, std::size_t width, const Check& check) {
    const Tensor hidden = call.input(0, "hidden", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    const Tensor mask = call.input(1, "mask", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
    if (hidden.dims.size() != 3 || hidden.dims[2] != static_cast<std::int64_t>(width)) {
        call.refuse("input 0 (hidden) has shape " + shown(hidden.dims) + ", expected [batch, tokens, " +
                    std::to_string(width) + "]");
    }
    const std::vector<std::int64_t> tokens(hidden.dims.begin(), hidden.dims.begin() + 2);
    if (mask.dims != tokens) {
        call.refuse("input 1 (mask) has shape " + shown(mask.dims) + ", expected " + shown(tokens));
    }
    if (elements(tokens) > kMostTokens)
        call.refuse("there are more than " + std::to_string(kMostTokens) + " tokens");
    float* y = call.output(hidden.dims);
    if (elements(hidden.dims) == 0) return;
    const auto batch = static_cast<std::size_t>(tokens[0]), length = static_cast<std::size_t>(tokens[1]);
    check(mask.as<std::int64_t>(), batch, length);
    block.run(hidden.as<float>(), mask.as<std::int64_t>(), batch, length, pool, y);
}

}  // namespace mrem::runtime
