// The table of functions that onnxruntime wants of an operator, made from a class with
//
//     static constexpr const char* kName;
//     static constexpr Port kInputs[];        // in order; the output is one float tensor
//     explicit Kernel(const Node&);           // throws what does not fit
//     void compute(const Call&, Pool&) const;
#pragma once

#include <memory>
#include <new>

#include "node.h"

namespace mrem::runtime {

constexpr std::uint32_t kApiVersion = 17;  // onnxruntime 1.17, the first with KernelContext_ParallelFor

struct Port {
    ONNXTensorElementDataType type;
    bool optional = false;
};

// Runs body(); what it throws becomes a status. Nothing is thrown.
template <class Body>
OrtStatus* guarded(const OrtApi& api, const Body& body) noexcept {
    try {
        body();
        return nullptr;
    } catch (const Error& problem) {
        return api.CreateStatus(ORT_INVALID_ARGUMENT, problem.what());
    } catch (const std::bad_alloc&) {
        return api.CreateStatus(ORT_RUNTIME_EXCEPTION, "mrem.runtime: there is not enough memory");
    } catch (const std::exception& problem) {
        return api.CreateStatus(ORT_RUNTIME_EXCEPTION, problem.what());
    } catch (...) {
        return api.CreateStatus(ORT_RUNTIME_EXCEPTION, "mrem.runtime: an unknown error");
    }
}

template <class Kernel>
struct Operator : OrtCustomOp {
    struct Made {
        const OrtApi& api;
        std::string title;
        Kernel kernel;
        std::size_t threads;
        Made(const OrtApi& ort, const Node& node, std::size_t count)
            : api(ort), title(node.title()), kernel(node), threads(count) {}
    };

    std::size_t threads;  // of the sessions that it is registered for

    explicit Operator(std::size_t count) : OrtCustomOp{}, threads(count) {
        constexpr std::size_t kInputCount = sizeof(Kernel::kInputs) / sizeof(Port);
        version = kApiVersion;
        GetName = [](const OrtCustomOp*) { return Kernel::kName; };
        GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
        GetInputTypeCount = [](const OrtCustomOp*) { return kInputCount; };
        GetInputType = [](const OrtCustomOp*, std::size_t i) { return Kernel::kInputs[i].type; };
        GetInputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
            return Kernel::kInputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
        };
        GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
        GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
        GetOutputType = [](const OrtCustomOp*, std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
        GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return INPUT_OUTPUT_REQUIRED; };
        GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
        GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
        GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
        GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
        GetStartVersion = [](const OrtCustomOp*) { return 1; };
        GetEndVersion = [](const OrtCustomOp*) { return 1; };
        CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                            void** kernel) {
            *kernel = nullptr;
            return guarded(*api, [&] {
                const Node node(*api, info, Kernel::kName);
                try {
                    *kernel = new Made(*api, node, static_cast<const Operator*>(op)->threads);
                } catch (const std::invalid_argument& problem) {  // what blocks.h cannot compute
                    node.refuse(problem.what());
                }
            });
        };
        KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
            const auto& made = *static_cast<const Made*>(kernel);
            return guarded(made.api, [&] {
                const Call call(made.api, context, made.title);
                SessionPool pool(call, made.threads);
                made.kernel.compute(call, pool);
            });
        };
        KernelDestroy = [](void* kernel) { delete static_cast<Made*>(kernel); };
    }
};

// New objects; onnxruntime wants them for as long as there is a session.
const OrtCustomOp* new_packed_embedding(std::size_t threads);
const OrtCustomOp* new_attention_block(std::size_t threads);
const OrtCustomOp* new_feed_forward_block(std::size_t threads);
const OrtCustomOp* new_low_bit_linear(std::size_t threads);

}  // namespace mrem::runtime
