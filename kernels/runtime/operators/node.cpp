// The contract is in node.h.
#include "node.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>

namespace mrem::runtime {
namespace {

// A status of onnxruntime as an Error, released. Null is success.
void expect(const OrtApi& api, OrtStatus* status, const std::string& where) {
    if (status == nullptr) return;
    std::string message;
    try {
        message = where + ": " + api.GetErrorMessage(status);
    } catch (...) {
        api.ReleaseStatus(status);
        throw;
    }
    api.ReleaseStatus(status);
    throw Error(message);
}

bool succeeded(const OrtApi& api, OrtStatus* status) {
    if (status != nullptr) api.ReleaseStatus(status);
    return status == nullptr;
}

std::string named(ONNXTensorElementDataType type) {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
            return "float";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
            return "uint8";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
            return "int8";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
            return "uint16";
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
            return "int64";
        default:
            return "type " + std::to_string(static_cast<int>(type));
    }
}

Tensor read(const OrtApi& api, const OrtValue* value, const std::string& where) {
    Tensor tensor;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    expect(api, api.GetTensorTypeAndShape(value, &info), where);
    struct Release {
        const OrtApi& api;
        OrtTensorTypeAndShapeInfo* info;
        ~Release() { api.ReleaseTensorTypeAndShapeInfo(info); }
    } release{api, info};
    std::size_t count = 0;
    expect(api, api.GetTensorElementType(info, &tensor.type), where);
    expect(api, api.GetDimensionsCount(info, &count), where);
    tensor.dims.resize(count);
    expect(api, api.GetDimensions(info, tensor.dims.data(), count), where);
    // The data is only read, but the interface has no other entry for it.
    if (elements(tensor.dims) != 0) {
        expect(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data), where);
        if (tensor.data == nullptr) throw Error(where + ": it has no data in memory");
    }
    return tensor;
}

std::string input_name(const std::string& title, std::size_t index, const char* name) {
    return title + ": input " + std::to_string(index) + " (" + name + ")";
}

}  // namespace

std::string shown(const std::vector<std::int64_t>& dims) {
    std::string text = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) {
        text += (i == 0 ? "" : ", ") + (dims[i] == kAnyLength ? "any" : std::to_string(dims[i]));
    }
    return text + "]";
}

std::size_t elements(const std::vector<std::int64_t>& dims) {
    constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 64;
    std::size_t total = 1;
    for (const std::int64_t dim : dims) {
        if (dim < 0) throw Error("the shape " + shown(dims) + " has a negative dimension");
        if (dim == 0) return 0;
    }
    for (const std::int64_t dim : dims) {
        if (static_cast<std::uint64_t>(dim) > kMost / total)
            throw Error("the shape " + shown(dims) + " is too large");
        total *= static_cast<std::size_t>(dim);
    }
    return total;
}

Node::Node(const OrtApi& api, const OrtKernelInfo* info, const char* operator_name)
    : api_(api), info_(info), title_(std::string("mrem.runtime ") + operator_name) {
    std::size_t size = 0;
    if (succeeded(api, api.KernelInfo_GetNodeName(info, nullptr, &size)) && size > 1) {
        std::string name(size, '\0');
        if (succeeded(api, api.KernelInfo_GetNodeName(info, name.data(), &size))) {
            title_ += " \"" + std::string(name.c_str()) + "\"";
        }
    }
    std::int64_t format = 0;
    if (!succeeded(api, api.KernelInfoGetAttribute_int64(info, "format", &format))) {
        refuse("the attribute format is missing, so this is not an operator of mrem_deploy");
    }
    if (format != kFormat) {
        refuse("the file has format " + std::to_string(format) + ", this library reads format " +
               std::to_string(kFormat) +
               (format > kFormat ? ": it was made by a newer mrem_deploy; update mrem-runtime"
                                 : ": export it again with this version of mrem_deploy"));
    }
}

void Node::refuse(const std::string& reason) const { throw Error(title_ + ": " + reason); }

std::int64_t Node::integer(const std::string& name, std::int64_t low, std::int64_t high) const {
    std::int64_t value = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name.c_str(), &value))) {
        refuse("the attribute " + name + " is missing or no integer");
    }
    if (value < low || value > high) {
        refuse("the attribute " + name + " is " + std::to_string(value) + ", which is not in " +
               std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
}

std::int64_t Node::one_of(const std::string& name, std::initializer_list<std::int64_t> allowed) const {
    constexpr auto kAny = std::numeric_limits<std::int64_t>::max();
    const std::int64_t value = integer(name, -kAny, kAny);
    if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
        refuse("the attribute " + name + " is " + std::to_string(value) + "; it can be " +
               shown(std::vector<std::int64_t>(allowed)));
    }
    return value;
}

float Node::finite(const std::string& name) const {
    float value = 0.0f;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name.c_str(), &value))) {
        refuse("the attribute " + name + " is missing or no number");
    }
    if (!std::isfinite(value)) refuse("the attribute " + name + " is not finite");
    return value;
}

std::string Node::text(const std::string& name) const {
    constexpr std::size_t kLongest = 1024;
    std::size_t size = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name.c_str(), nullptr, &size)) ||
        size > kLongest) {
        refuse("the attribute " + name + " is missing or no text");
    }
    std::string value(size, '\0');
    expect(api_, api_.KernelInfoGetAttribute_string(info_, name.c_str(), value.data(), &size),
           title_ + ": " + name);
    return value.c_str();
}

Tensor Node::constant(std::size_t index, const char* name, ONNXTensorElementDataType type,
                      const std::vector<std::int64_t>& dims) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    const std::string where = input_name(title_, index, name);
    expect(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value), where);
    if (is_constant == 0 || value == nullptr) throw Error(where + " must be an initializer of the file");
    Tensor tensor = read(api_, value, where);
    if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED && tensor.type != type) {
        throw Error(where + " is " + named(tensor.type) + ", expected " + named(type));
    }
    bool fits = tensor.dims.size() == dims.size();
    for (std::size_t i = 0; fits && i < dims.size(); ++i) {
        fits = dims[i] == kAnyLength ? tensor.dims[i] > 0 : tensor.dims[i] == dims[i];
    }
    if (!fits) throw Error(where + " has shape " + shown(tensor.dims) + ", expected " + shown(dims));
    return tensor;
}

bool Node::has_constant(std::size_t index) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    return succeeded(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value)) &&
           is_constant != 0 && value != nullptr;
}

Grid Node::grid(const std::string& name) const {
    Grid grid;
    grid.scale = finite(name + "_scale");
    if (!(grid.scale > 0.0f)) {
        refuse("the attribute " + name + "_scale is " + std::to_string(grid.scale) + ", not above 0");
    }
    grid.zero_point = static_cast<std::int32_t>(integer(name + "_zero_point", 0, 255));
    grid.low = static_cast<std::int32_t>(integer(name + "_min", 0, 255));
    grid.high = static_cast<std::int32_t>(integer(name + "_max", grid.low, 255));
    return grid;
}

void Node::grid_of_codes(const std::string& prefix, int& bits, int& spacing, int& low) const {
    bits = static_cast<int>(one_of(prefix + "bits", {2, 4, 8}));
    spacing = static_cast<int>(integer(prefix + "spacing", 1, bits == 2 ? 2 : 1));
    const int lowest = spacing == 2 ? -3 : bits == 2 ? -1 : -(1 << (bits - 1));
    low = static_cast<int>(one_of(prefix + "low", {lowest}));
}

Weight Node::weight(const std::string& prefix, std::size_t first, std::size_t in, std::size_t out) const {
    Weight weight{};
    weight.in = in;
    weight.out = out;
    grid_of_codes(prefix.empty() ? "" : prefix + "_", weight.bits, weight.spacing, weight.low);
    const auto width = static_cast<std::int64_t>(out);
    const std::vector<std::int64_t> packed = {static_cast<std::int64_t>(panels(out)),
                                              static_cast<std::int64_t>(steps(in, weight.bits)),
                                              static_cast<std::int64_t>(kStepBytes)};
    const std::string name = prefix.empty() ? "weight" : prefix;
    weight.codes = constant(first, (name + " codes").c_str(), ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, packed)
                       .as<std::uint8_t>();
    weight.scale = floats(first + 1, (name + " scale").c_str(), {width});
    weight.bias = floats(first + 2, (name + " bias").c_str(), {width});
    return weight;
}

float Node::epsilon() const {
    const float value = finite("epsilon");
    if (!(value >= 0.0f)) refuse("the attribute epsilon is " + std::to_string(value) + ", below 0");
    return value;
}

void Call::refuse(const std::string& reason) const { throw Error(title_ + ": " + reason); }

Tensor Call::input(std::size_t index, const char* name, ONNXTensorElementDataType type) const {
    Tensor tensor = optional_input(index, name, type);
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) {
        throw Error(input_name(title_, index, name) + " is missing");
    }
    return tensor;
}

Tensor Call::optional_input(std::size_t index, const char* name, ONNXTensorElementDataType type) const {
    const std::string where = input_name(title_, index, name);
    std::size_t count = 0;
    expect(api_, api_.KernelContext_GetInputCount(context_, &count), where);
    if (index >= count) return {};
    const OrtValue* value = nullptr;
    expect(api_, api_.KernelContext_GetInput(context_, index, &value), where);
    if (value == nullptr) return {};
    Tensor tensor = read(api_, value, where);
    if (tensor.type != type) throw Error(where + " is " + named(tensor.type) + ", expected " + named(type));
    return tensor;
}

float* Call::output(const std::vector<std::int64_t>& dims) const {
    OrtValue* value = nullptr;
    void* data = nullptr;
    expect(api_, api_.KernelContext_GetOutput(context_, 0, dims.data(), dims.size(), &value),
           title_ + ": the output");
    if (value == nullptr) throw Error(title_ + ": the output is missing");
    if (elements(dims) == 0) return nullptr;
    expect(api_, api_.GetTensorMutableData(value, &data), title_ + ": the output");
    if (data == nullptr) throw Error(title_ + ": the output has no memory");
    return static_cast<float*>(data);
}

void SessionPool::run(std::size_t tasks, void (*body)(std::size_t task, void* context), void* context) {
    struct Shared {
        void (*body)(std::size_t, void*);
        void* context;
        std::atomic<bool> failed{false};
        std::exception_ptr first;
    } shared{body, context, {}, {}};
    const auto guarded = [](void* state, std::size_t task) noexcept {
        auto& common = *static_cast<Shared*>(state);
        try {
            common.body(task, common.context);
        } catch (...) {
            if (!common.failed.exchange(true)) common.first = std::current_exception();
        }
    };
    if (tasks == 1) {
        guarded(&shared, 0);
    } else if (tasks > 1) {
        expect(call_.api(),
               call_.api().KernelContext_ParallelFor(call_.context(), guarded, tasks, 0, &shared),
               "mrem.runtime: onnxruntime's threads");
    }
    if (shared.first) std::rethrow_exception(shared.first);
}

}  // namespace mrem::runtime
