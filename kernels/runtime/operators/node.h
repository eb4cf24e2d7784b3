// A node of the graph as an operator sees it: when its kernel is made (Node) and when it runs (Call).
//
// Everything that comes from outside passes through here and is checked here. What does not fit is an Error,
// which operator.h turns into an onnxruntime error; no exception leaves the library.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "../blocks.h"
#include "../ort_api.h"

namespace mrem::runtime {

constexpr std::int64_t kFormat = 1;  // of the operators' inputs and attributes
constexpr std::int64_t kAnyLength = -1;

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Tensor {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    std::vector<std::int64_t> dims;
    void* data = nullptr;  // null also if it has no elements

    template <class T>
    const T* as() const {
        return static_cast<const T*>(data);
    }
};

// "[2, 3]"
std::string shown(const std::vector<std::int64_t>& dims);

// The number of elements; throws Error if a dimension is negative or their product is beyond any memory.
std::size_t elements(const std::vector<std::int64_t>& dims);

// While a kernel is made. Every method throws Error, naming the operator, the node and the reason.
class Node {
  public:
    Node(const OrtApi& api, const OrtKernelInfo* info, const char* operator_name);

    const OrtApi& api() const { return api_; }
    const std::string& title() const { return title_; }
    [[noreturn]] void refuse(const std::string& reason) const;

    std::int64_t integer(const std::string& name, std::int64_t low, std::int64_t high) const;
    std::int64_t one_of(const std::string& name, std::initializer_list<std::int64_t> allowed) const;
    float finite(const std::string& name) const;
    std::string text(const std::string& name) const;

    // An input that the file holds, of this type and shape; kAnyLength stands for any dimension above 0.
    Tensor constant(std::size_t index, const char* name, ONNXTensorElementDataType type,
                    const std::vector<std::int64_t>& dims) const;
    // Whether the file holds it: an optional input may be absent.
    bool has_constant(std::size_t index) const;
    const float* floats(std::size_t index, const char* name, const std::vector<std::int64_t>& dims) const {
        return constant(index, name, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, dims).as<float>();
    }

    // Attributes NAME_scale, NAME_zero_point, NAME_min and NAME_max.
    Grid grid(const std::string& name) const;
    // Attributes bits, spacing and low, with the prefix: one of the grids that weights have.
    void grid_of_codes(const std::string& prefix, int& bits, int& spacing, int& low) const;
    // The same with PREFIX_ in front, and inputs `first` to `first + 2`: codes, scale, bias.
    Weight weight(const std::string& prefix, std::size_t first, std::size_t in, std::size_t out) const;
    float epsilon() const;

  private:
    const OrtApi& api_;
    const OrtKernelInfo* info_;
    std::string title_;
};

// While it runs.
class Call {
  public:
    Call(const OrtApi& api, OrtKernelContext* context, const std::string& title)
        : api_(api), context_(context), title_(title) {}

    [[noreturn]] void refuse(const std::string& reason) const;
    Tensor input(std::size_t index, const char* name, ONNXTensorElementDataType type) const;
    // The same of an optional one: without type if it is absent.
    Tensor optional_input(std::size_t index, const char* name, ONNXTensorElementDataType type) const;
    float* output(const std::vector<std::int64_t>& dims) const;
    const OrtApi& api() const { return api_; }
    const OrtKernelContext* context() const { return context_; }

  private:
    const OrtApi& api_;
    OrtKernelContext* context_;
    const std::string& title_;
};

// onnxruntime's threads, for the time of one call.
class SessionPool final : public Pool {
  public:
    SessionPool(const Call& call, std::size_t threads) : call_(call), threads_(threads) {}
    std::size_t threads() const override { return threads_; }
    void run(std::size_t tasks, void (*body)(std::size_t task, void* context), void* context) override;

  private:
    const Call& call_;
    std::size_t threads_;
};

}  // namespace mrem::runtime
