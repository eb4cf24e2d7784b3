// AttentionBlock(hidden, mask, qkv codes, scale, bias, out codes, scale, bias, gamma, beta).
#include <algorithm>

#include "encoder_block.h"
#include "operator.h"

namespace mrem::runtime {
namespace {

// Products of two codes, 255 · 255 each, that a sum of 32 bits holds.
constexpr std::size_t kLongestProduct = 33025;
// Columns of a head: differences of two scores fit as well.
constexpr std::size_t kWidestHead = 16384;

AttentionShape attention_shape(const Node& node) {
    AttentionShape shape{};
    const std::int64_t hidden = node.integer("qkv_in", 1, kMostHidden);
    shape.hidden = static_cast<std::size_t>(hidden);
    shape.heads = static_cast<std::size_t>(node.integer("heads", 1, hidden));
    if (shape.hidden % shape.heads != 0) {
        node.refuse("the attribute heads is " + std::to_string(shape.heads) +
                    ", which does not divide qkv_in = " + std::to_string(hidden));
    }
    if (shape.hidden / shape.heads > kWidestHead) {
        node.refuse("heads of " + std::to_string(shape.hidden / shape.heads) + " columns are wider than " +
                    std::to_string(kWidestHead));
    }
    node.integer("qkv_out", 3 * hidden, 3 * hidden);
    node.integer("out_in", hidden, hidden);
    node.integer("out_out", hidden, hidden);
    shape.scaling = node.finite("scaling");
    shape.epsilon = node.epsilon();
    shape.x = node.grid("x");
    shape.o = node.grid("o");
    const std::string attention = node.text("attention");
    if (attention != "int8" && attention != "float") {
        node.refuse("the attribute attention is \"" + attention + "\"; it can be int8 or float");
    }
    shape.integers = attention == "int8";
    if (shape.integers) {
        shape.q_scaled = node.finite("q_scaled");
        if (!(shape.q_scaled > 0.0f)) {
            node.refuse("the attribute q_scaled is " + std::to_string(shape.q_scaled) + ", not positive");
        }
        shape.q = node.grid("q");
        shape.k = node.grid("k");
        shape.p = node.grid("p");
        shape.v = node.grid("v");
    }
    shape.qkv = node.weight("qkv", 2, shape.hidden, 3 * shape.hidden);
    shape.out = node.weight("out", 5, shape.hidden, shape.hidden);
    shape.gamma = node.floats(8, "gamma", {hidden});
    shape.beta = node.floats(9, "beta", {hidden});
    return shape;
}

class AttentionKernel {
  public:
    static constexpr const char* kName = "AttentionBlock";
    static constexpr const Port (&kInputs)[10] = kEncoderBlockInputs;

    explicit AttentionKernel(const Node& node) : AttentionKernel(attention_shape(node)) {}
    void compute(const Call& call, Pool& pool) const {
        run_block(call, pool, block_, hidden_,
                  [&](const std::int64_t* mask, std::size_t batch, std::size_t tokens) {
                      for (std::size_t b = 0; tokens > kLongestProduct && b < batch; ++b) {
                          const std::size_t padding = static_cast<std::size_t>(
                              std::count(mask + b * tokens, mask + (b + 1) * tokens, 0));
                          if (tokens - padding > kLongestProduct) {
                              call.refuse("example " + std::to_string(b) + " has " +
                                          std::to_string(tokens - padding) + " tokens, more than " +
                                          std::to_string(kLongestProduct));
                          }
                      }
                  });
    }

  private:
    explicit AttentionKernel(const AttentionShape& shape) : hidden_(shape.hidden), block_(shape) {}

    std::size_t hidden_;
    AttentionBlock block_;
};

}  // namespace

const OrtCustomOp* new_attention_block(std::size_t threads) { return new Operator<AttentionKernel>(threads); }

}  // namespace mrem::runtime
