// FeedForwardBlock(hidden, mask, up codes, scale, bias, down codes, scale, bias, gamma, beta).
#include "encoder_block.h"
#include "operator.h"

namespace mrem::runtime {
namespace {

FeedForwardShape feed_forward_shape(const Node& node) {
    FeedForwardShape shape{};
    const std::int64_t hidden = node.integer("up_in", 1, kMostHidden);
    const std::int64_t middle = node.integer("up_out", 1, kMostHidden);
    node.integer("down_in", middle, middle);
    node.integer("down_out", hidden, hidden);
    shape.hidden = static_cast<std::size_t>(hidden);
    shape.middle = static_cast<std::size_t>(middle);
    shape.epsilon = node.epsilon();
    shape.x = node.grid("x");
    shape.m = node.grid("m");
    shape.up = node.weight("up", 2, shape.hidden, shape.middle);
    shape.down = node.weight("down", 5, shape.middle, shape.hidden);
    shape.gamma = node.floats(8, "gamma", {hidden});
    shape.beta = node.floats(9, "beta", {hidden});
    return shape;
}

class FeedForwardKernel {
  public:
    static constexpr const char* kName = "FeedForwardBlock";
    static constexpr const Port (&kInputs)[10] = kEncoderBlockInputs;

    explicit FeedForwardKernel(const Node& node) : FeedForwardKernel(feed_forward_shape(node)) {}
    void compute(const Call& call, Pool& pool) const {
        run_block(call, pool, block_, hidden_, [](const std::int64_t*, std::size_t, std::size_t) {});
    }

  private:
    explicit FeedForwardKernel(const FeedForwardShape& shape) : hidden_(shape.hidden), block_(shape) {}

    std::size_t hidden_;
    FeedForwardBlock block_;
};

}  // namespace

const OrtCustomOp* new_feed_forward_block(std::size_t threads) {
    return new Operator<FeedForwardKernel>(threads);
}

}  // namespace mrem::runtime
