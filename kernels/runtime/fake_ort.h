// A small onnxruntime for tests and the fuzzer: what ort_api.h names, and nothing else. Tensors are heap
// blocks of exactly their size, so that the address sanitizer sees one byte too many; what is not released is
// a leak.
//
// Entries that the library does not use end the process. `fail_at` lets one call fail.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ort_api.h"

struct OrtStatus {
    OrtErrorCode code;
    std::string message;
};

struct OrtValue {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    std::vector<std::int64_t> dims;
    std::size_t bytes = 0;
    std::unique_ptr<std::uint8_t[]> data;
};

struct OrtTensorTypeAndShapeInfo {
    const OrtValue* value;
};

struct OrtKernelInfo {
    std::string name = "node";
    std::map<std::string, std::int64_t> integers;
    std::map<std::string, float> floats;
    std::map<std::string, std::string> texts;
    std::map<std::size_t, const OrtValue*> constants;
};

struct OrtKernelContext {
    std::vector<const OrtValue*> inputs;
    OrtValue output;
    std::size_t threads = 1;
};

struct OrtCustomOpDomain {
    std::string name;
    std::vector<const OrtCustomOp*> ops;
};

struct OrtSessionOptions {
    std::map<std::string, std::string> entries;
    std::vector<OrtCustomOpDomain*> domains;
};

namespace fake_ort {

inline std::size_t element_size(ONNXTensorElementDataType type) {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
            return 4;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
            return 2;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
            return 8;
        default:
            return 1;
    }
}

inline void resize(OrtValue& value, ONNXTensorElementDataType type, std::vector<std::int64_t> dims) {
    std::size_t bytes = element_size(type);
    for (const std::int64_t dim : dims) bytes *= static_cast<std::size_t>(dim);
    value.type = type;
    value.dims = std::move(dims);
    value.bytes = bytes;
    value.data.reset(new std::uint8_t[bytes]);
}

template <class T>
OrtValue tensor(ONNXTensorElementDataType type, std::vector<std::int64_t> dims,
                const std::vector<T>& values) {
    OrtValue made;
    resize(made, type, std::move(dims));
    if (made.bytes != values.size() * sizeof(T)) std::abort();
    if (made.bytes != 0) std::memcpy(made.data.get(), values.data(), made.bytes);
    return made;
}

// Calls left until one fails; negative: none does. Only for calls from one thread.
inline long fail_at = -1;

inline bool fails() { return fail_at >= 0 && fail_at-- == 0; }

inline OrtStatus* status(const char* message) { return new OrtStatus{ORT_FAIL, message}; }

template <class Map, class Out>
OrtStatus* attribute(const Map& map, const char* name, Out* out) {
    const auto found = map.find(name);
    if (fails() || found == map.end()) return status("no such attribute");
    *out = found->second;
    return nullptr;
}

// Text as onnxruntime gives it: the size first, with the final zero; an error if there is less room.
inline OrtStatus* text(const std::string& value, char* out, std::size_t* size) {
    const std::size_t room = *size;
    *size = value.size() + 1;
    if (out == nullptr) return nullptr;
    if (room < *size) return status("not enough room");
    std::memcpy(out, value.c_str(), *size);
    return nullptr;
}

inline void unused() {
    std::fputs("a call that this onnxruntime does not have\n", stderr);
    std::abort();
}

inline OrtApi made_api() {
    OrtApi api;
    void (*missing)() = unused;
    for (std::size_t i = 0; i < sizeof api / sizeof missing; ++i) {
        std::memcpy(reinterpret_cast<char*>(&api) + i * sizeof missing, &missing, sizeof missing);
    }
    api.CreateStatus = [](OrtErrorCode code, const char* message) { return new OrtStatus{code, message}; };
    api.GetErrorMessage = [](const OrtStatus* status) { return status->message.c_str(); };
    api.ReleaseStatus = [](OrtStatus* status) { delete status; };
    api.CreateCustomOpDomain = [](const char* domain, OrtCustomOpDomain** out) -> OrtStatus* {
        if (fails()) return status("no domain");
        *out = new OrtCustomOpDomain{domain, {}};
        return nullptr;
    };
    api.CustomOpDomain_Add = [](OrtCustomOpDomain* domain, const OrtCustomOp* op) -> OrtStatus* {
        if (fails()) return status("no operator");
        domain->ops.push_back(op);
        return nullptr;
    };
    api.AddCustomOpDomain = [](OrtSessionOptions* options, OrtCustomOpDomain* domain) -> OrtStatus* {
        if (fails()) return status("no domain added");
        options->domains.push_back(domain);
        return nullptr;
    };
    api.HasSessionConfigEntry = [](const OrtSessionOptions* options, const char* key,
                                   int* out) -> OrtStatus* {
        if (fails()) return status("no entries");
        *out = options->entries.count(key) != 0;
        return nullptr;
    };
    api.GetSessionConfigEntry = [](const OrtSessionOptions* options, const char* key, char* out,
                                   std::size_t* size) -> OrtStatus* {
        if (fails()) return status("no entry");
        return text(options->entries.at(key), out, size);
    };
    api.ReleaseCustomOpDomain = [](OrtCustomOpDomain* domain) { delete domain; };

    api.GetTensorTypeAndShape = [](const OrtValue* value, OrtTensorTypeAndShapeInfo** out) -> OrtStatus* {
        if (fails()) return status("no shape");
        *out = new OrtTensorTypeAndShapeInfo{value};
        return nullptr;
    };
    api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* info) { delete info; };
    api.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* info,
                                  ONNXTensorElementDataType* out) -> OrtStatus* {
        if (fails()) return status("no type");
        *out = info->value->type;
        return nullptr;
    };
    api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* info, std::size_t* out) -> OrtStatus* {
        if (fails()) return status("no dimensions");
        *out = info->value->dims.size();
        return nullptr;
    };
    api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims,
                           std::size_t count) -> OrtStatus* {
        if (fails()) return status("no dimensions");
        for (std::size_t i = 0; i < count && i < info->value->dims.size(); ++i)
            dims[i] = info->value->dims[i];
        return nullptr;
    };
    api.GetTensorMutableData = [](OrtValue* value, void** out) -> OrtStatus* {
        if (fails()) return status("no data");
        *out = value->data.get();
        return nullptr;
    };

    api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name, float* out) {
        return attribute(info->floats, name, out);
    };
    api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name, std::int64_t* out) {
        return attribute(info->integers, name, out);
    };
    api.KernelInfoGetAttribute_string = [](const OrtKernelInfo* info, const char* name, char* out,
                                           std::size_t* size) -> OrtStatus* {
        const auto found = info->texts.find(name);
        if (fails() || found == info->texts.end()) return status("no such attribute");
        return text(found->second, out, size);
    };
    api.KernelInfo_GetNodeName = [](const OrtKernelInfo* info, char* out, std::size_t* size) -> OrtStatus* {
        if (fails()) return status("no name");
        return text(info->name, out, size);
    };
    api.KernelInfoGetConstantInput_tensor = [](const OrtKernelInfo* info, std::size_t index, int* is_constant,
                                               const OrtValue** out) -> OrtStatus* {
        if (fails()) return status("no input");
        const auto found = info->constants.find(index);
        *is_constant = found != info->constants.end();
        *out = found != info->constants.end() ? found->second : nullptr;
        return nullptr;
    };

    api.KernelContext_GetInputCount = [](const OrtKernelContext* context, std::size_t* out) -> OrtStatus* {
        if (fails()) return status("no count");
        *out = context->inputs.size();
        return nullptr;
    };
    api.KernelContext_GetOutputCount = [](const OrtKernelContext*, std::size_t* out) -> OrtStatus* {
        *out = 1;
        return nullptr;
    };
    api.KernelContext_GetInput = [](const OrtKernelContext* context, std::size_t index,
                                    const OrtValue** out) -> OrtStatus* {
        if (fails() || index >= context->inputs.size()) return status("no input");
        *out = context->inputs[index];
        return nullptr;
    };
    api.KernelContext_GetOutput = [](OrtKernelContext* context, std::size_t, const std::int64_t* dims,
                                     std::size_t count, OrtValue** out) -> OrtStatus* {
        if (fails()) return status("no output");
        resize(context->output, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {dims, dims + count});
        *out = &context->output;
        return nullptr;
    };
    api.KernelContext_ParallelFor = [](const OrtKernelContext* context, void (*task)(void*, std::size_t),
                                       std::size_t total, std::size_t, void* data) -> OrtStatus* {
        if (fails()) return status("no threads");
        std::atomic<std::size_t> next{0};
        const auto work = [&] {
            for (std::size_t i; (i = next.fetch_add(1)) < total;) task(data, i);
        };
        std::vector<std::thread> others;
        for (std::size_t i = 1; i < context->threads && i < total; ++i) others.emplace_back(work);
        work();
        for (std::thread& other : others) other.join();
        return nullptr;
    };
    return api;
}

inline const OrtApi& api() {
    static const OrtApi made = made_api();
    return made;
}

// An onnxruntime of this version of the interface.
inline std::uint32_t version = 23;

inline const OrtApiBase& base() {
    static const OrtApiBase made = {
        [](std::uint32_t wanted) -> const OrtApi* { return wanted <= version ? &api() : nullptr; },
        [] { return "1.fake"; }};
    return made;
}

}  // namespace fake_ort
