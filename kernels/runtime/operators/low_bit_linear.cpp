// LowBitLinear(x, codes, scale, bias): x is (..., in), y (..., out).
#include "operator.h"

namespace mrem::runtime {
namespace {

LinearShape linear_shape(const Node& node) {
    constexpr auto kMost = static_cast<std::int64_t>(kMostInputs);
    LinearShape shape{};
    const auto in = static_cast<std::size_t>(node.integer("in", 1, kMost));
    const auto out = static_cast<std::size_t>(node.integer("out", 1, 16 * kMost));
    shape.x = node.grid("x");
    shape.weight = node.weight("", 1, in, out);
    return shape;
}

class LinearKernel {
  public:
    static constexpr const char* kName = "LowBitLinear";
    static constexpr Port kInputs[] = {
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    };

    explicit LinearKernel(const Node& node) : LinearKernel(linear_shape(node)) {}

    void compute(const Call& call, Pool& pool) const {
        const Tensor x = call.input(0, "x", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
        if (x.dims.empty() || x.dims.back() != static_cast<std::int64_t>(in_)) {
            call.refuse("input 0 (x) has shape " + shown(x.dims) + ", expected [..., " + std::to_string(in_) +
                        "]");
        }
        std::vector<std::int64_t> dims = x.dims;
        dims.back() = static_cast<std::int64_t>(out_);
        elements(dims);
        float* y = call.output(dims);
        const std::size_t rows = elements(x.dims) / in_;
        if (rows != 0) linear_.run(x.as<float>(), rows, pool, y);
    }

  private:
    explicit LinearKernel(const LinearShape& shape)
        : in_(shape.weight.in), out_(shape.weight.out), linear_(shape) {}

    std::size_t in_, out_;
    LowBitLinear linear_;
};

}  // namespace

const OrtCustomOp* new_low_bit_linear(std::size_t threads) { return new Operator<LinearKernel>(threads); }

}  // namespace mrem::runtime
