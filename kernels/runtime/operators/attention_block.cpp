// AttentionBlock(hidden, mask, qkv codes, scale, bias, out codes, scale, bias, gamma, beta).
#include "encoder_block.h"
#include "operator.h"

namespace mrem::runtime {
namespace {

AttentionShape attention_shape(const Node& node) {
    AttentionShape shape{};
    const std::int64_t hidden = node.integer("qkv_in", 1, kMostHidden);
    shape.hidden = static_cast<std::size_t>(hidden);
    shape.heads = static_cast<std::size_t>(node.integer("heads", 1, hidden));
    if (shape.hidden % shape.heads != 0) {
        node.refuse("the attribute heads is " + std::to_string(shape.heads) +
                    ", which does not divide qkv_in = " + std::to_string(hidden));
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
    void compute(const Call& call, Pool& pool) const { run_block(call, pool, block_, hidden_); }

  private:
    explicit AttentionKernel(const AttentionShape& shape) : hidden_(shape.hidden), block_(shape) {}

    std::size_t hidden_;
    AttentionBlock block_;
};

}  // namespace

const OrtCustomOp& attention_block() {
    static const Operator<AttentionKernel> op;
    return op;
}

}  // namespace mrem::runtime
