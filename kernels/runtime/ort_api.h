// The part of onnxruntime's C interface that a library of custom operators needs, written down by hand.
//
// No package that pip installs has onnxruntime's headers, and the interface only ever grows at its end: an
// entry keeps its place for good. So the entries used are here, each at its place, and library.cpp asks for
// version 17, the first with all of them. Unused places are gaps.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtCustomOp;

enum OrtErrorCode : int {
    ORT_FAIL = 1,
    ORT_INVALID_ARGUMENT = 2,
    ORT_RUNTIME_EXCEPTION = 6,
    ORT_NOT_IMPLEMENTED = 9
};

enum ONNXTensorElementDataType : int {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,  // of a declared input: any type
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16 = 4,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
};

enum OrtCustomOpInputOutputCharacteristic : int {
    INPUT_OUTPUT_REQUIRED = 0,
    INPUT_OUTPUT_OPTIONAL = 1,
};

enum OrtMemType : int { OrtMemTypeDefault = 0 };

#ifdef _WIN32
#define MREM_ORT_CALL __stdcall
#else
#define MREM_ORT_CALL
#endif

struct OrtApi {
    OrtStatus*(MREM_ORT_CALL* CreateStatus)(OrtErrorCode code, const char* message);
    void* gap_1[1];
    const char*(MREM_ORT_CALL* GetErrorMessage)(const OrtStatus* status);
    void* gap_3[23];
    OrtStatus*(MREM_ORT_CALL* CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
    OrtStatus*(MREM_ORT_CALL* CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
    OrtStatus*(MREM_ORT_CALL* AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
    void* gap_29[22];
    OrtStatus*(MREM_ORT_CALL* GetTensorMutableData)(OrtValue* value, void** out);
    void* gap_52[8];
    OrtStatus*(MREM_ORT_CALL* GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info,
                                                    ONNXTensorElementDataType* out);
    OrtStatus*(MREM_ORT_CALL* GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, std::size_t* out);
    OrtStatus*(MREM_ORT_CALL* GetDimensions)(const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims,
                                             std::size_t count);
    void* gap_63[2];
    OrtStatus*(MREM_ORT_CALL* GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
    void* gap_66[19];
    OrtStatus*(MREM_ORT_CALL* KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name,
                                                            float* out);
    OrtStatus*(MREM_ORT_CALL* KernelInfoGetAttribute_int64)(const OrtKernelInfo* info, const char* name,
                                                            std::int64_t* out);
    OrtStatus*(MREM_ORT_CALL* KernelInfoGetAttribute_string)(const OrtKernelInfo* info, const char* name,
                                                             char* out, std::size_t* size);
    OrtStatus*(MREM_ORT_CALL* KernelContext_GetInputCount)(const OrtKernelContext* context, std::size_t* out);
    OrtStatus*(MREM_ORT_CALL* KernelContext_GetOutputCount)(const OrtKernelContext* context,
                                                            std::size_t* out);
    OrtStatus*(MREM_ORT_CALL* KernelContext_GetInput)(const OrtKernelContext* context, std::size_t index,
                                                      const OrtValue** out);
    OrtStatus*(MREM_ORT_CALL* KernelContext_GetOutput)(OrtKernelContext* context, std::size_t index,
                                                       const std::int64_t* dims, std::size_t count,
                                                       OrtValue** out);
    void* gap_92[1];
    void(MREM_ORT_CALL* ReleaseStatus)(OrtStatus* status);
    void* gap_94[5];
    void(MREM_ORT_CALL* ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
    void* gap_100[1];
    void(MREM_ORT_CALL* ReleaseCustomOpDomain)(OrtCustomOpDomain* domain);
    void* gap_102[135];
    OrtStatus*(MREM_ORT_CALL* HasSessionConfigEntry)(const OrtSessionOptions* options, const char* key,
                                                     int* out);
    OrtStatus*(MREM_ORT_CALL* GetSessionConfigEntry)(const OrtSessionOptions* options, const char* key,
                                                     char* out, std::size_t* size);
    void* gap_239[5];
    OrtStatus*(MREM_ORT_CALL* KernelInfo_GetNodeName)(const OrtKernelInfo* info, char* out,
                                                      std::size_t* size);
    void* gap_245[4];
    // The tensor belongs to the session and stays where it is for as long as the kernel exists.
    OrtStatus*(MREM_ORT_CALL* KernelInfoGetConstantInput_tensor)(const OrtKernelInfo* info, std::size_t index,
                                                                 int* is_constant, const OrtValue** out);
    void* gap_250[24];
    // Calls task(data, i) for every i < total on the threads of the session, and returns when all are done.
    OrtStatus*(MREM_ORT_CALL* KernelContext_ParallelFor)(const OrtKernelContext* context,
                                                         void (*task)(void* data, std::size_t index),
                                                         std::size_t total, std::size_t batches, void* data);
};

struct OrtApiBase {
    const OrtApi*(MREM_ORT_CALL* GetApi)(std::uint32_t version);  // null if this onnxruntime is older
    const char*(MREM_ORT_CALL* GetVersionString)();
};

struct OrtCustomOp {
    std::uint32_t version;
    void*(MREM_ORT_CALL* CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
    const char*(MREM_ORT_CALL* GetName)(const OrtCustomOp* op);
    const char*(MREM_ORT_CALL* GetExecutionProviderType)(const OrtCustomOp* op);
    ONNXTensorElementDataType(MREM_ORT_CALL* GetInputType)(const OrtCustomOp* op, std::size_t index);
    std::size_t(MREM_ORT_CALL* GetInputTypeCount)(const OrtCustomOp* op);
    ONNXTensorElementDataType(MREM_ORT_CALL* GetOutputType)(const OrtCustomOp* op, std::size_t index);
    std::size_t(MREM_ORT_CALL* GetOutputTypeCount)(const OrtCustomOp* op);
    void(MREM_ORT_CALL* KernelCompute)(void* kernel, OrtKernelContext* context);
    void(MREM_ORT_CALL* KernelDestroy)(void* kernel);
    OrtCustomOpInputOutputCharacteristic(MREM_ORT_CALL* GetInputCharacteristic)(const OrtCustomOp* op,
                                                                                std::size_t index);
    OrtCustomOpInputOutputCharacteristic(MREM_ORT_CALL* GetOutputCharacteristic)(const OrtCustomOp* op,
                                                                                 std::size_t index);
    OrtMemType(MREM_ORT_CALL* GetInputMemoryType)(const OrtCustomOp* op, std::size_t index);
    int(MREM_ORT_CALL* GetVariadicInputMinArity)(const OrtCustomOp* op);
    int(MREM_ORT_CALL* GetVariadicInputHomogeneity)(const OrtCustomOp* op);
    int(MREM_ORT_CALL* GetVariadicOutputMinArity)(const OrtCustomOp* op);
    int(MREM_ORT_CALL* GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
    OrtStatus*(MREM_ORT_CALL* CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api,
                                              const OrtKernelInfo* info, void** kernel);
    OrtStatus*(MREM_ORT_CALL* KernelComputeV2)(void* kernel, OrtKernelContext* context);
    OrtStatus*(MREM_ORT_CALL* InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
    int(MREM_ORT_CALL* GetStartVersion)(const OrtCustomOp* op);
    int(MREM_ORT_CALL* GetEndVersion)(const OrtCustomOp* op);
    std::size_t(MREM_ORT_CALL* GetMayInplace)(int** inputs, int** outputs);
    void(MREM_ORT_CALL* ReleaseMayInplace)(int* inputs, int* outputs);
    std::size_t(MREM_ORT_CALL* GetAliasMap)(int** inputs, int** outputs);
    void(MREM_ORT_CALL* ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // extern "C"

#define MREM_ORT_PLACE(entry, place) \
    static_assert(offsetof(OrtApi, entry) == (place) * sizeof(void*), "OrtApi::" #entry)
MREM_ORT_PLACE(CreateStatus, 0);
MREM_ORT_PLACE(GetErrorMessage, 2);
MREM_ORT_PLACE(CreateCustomOpDomain, 26);
MREM_ORT_PLACE(CustomOpDomain_Add, 27);
MREM_ORT_PLACE(AddCustomOpDomain, 28);
MREM_ORT_PLACE(GetTensorMutableData, 51);
MREM_ORT_PLACE(GetTensorElementType, 60);
MREM_ORT_PLACE(GetDimensionsCount, 61);
MREM_ORT_PLACE(GetDimensions, 62);
MREM_ORT_PLACE(GetTensorTypeAndShape, 65);
MREM_ORT_PLACE(KernelInfoGetAttribute_float, 85);
MREM_ORT_PLACE(KernelInfoGetAttribute_int64, 86);
MREM_ORT_PLACE(KernelInfoGetAttribute_string, 87);
MREM_ORT_PLACE(KernelContext_GetInputCount, 88);
MREM_ORT_PLACE(KernelContext_GetOutputCount, 89);
MREM_ORT_PLACE(KernelContext_GetInput, 90);
MREM_ORT_PLACE(KernelContext_GetOutput, 91);
MREM_ORT_PLACE(ReleaseStatus, 93);
MREM_ORT_PLACE(ReleaseTensorTypeAndShapeInfo, 99);
MREM_ORT_PLACE(ReleaseCustomOpDomain, 101);
MREM_ORT_PLACE(HasSessionConfigEntry, 237);
MREM_ORT_PLACE(GetSessionConfigEntry, 238);
MREM_ORT_PLACE(KernelInfo_GetNodeName, 244);
MREM_ORT_PLACE(KernelInfoGetConstantInput_tensor, 249);
MREM_ORT_PLACE(KernelContext_ParallelFor, 274);
#undef MREM_ORT_PLACE

#define MREM_ORT_OFFSET(member, bytes) \
    static_assert(sizeof(void*) != 8 || offsetof(OrtCustomOp, member) == (bytes), "OrtCustomOp::" #member)
MREM_ORT_OFFSET(version, 0);
MREM_ORT_OFFSET(CreateKernel, 8);
MREM_ORT_OFFSET(GetName, 16);
MREM_ORT_OFFSET(GetInputType, 32);
MREM_ORT_OFFSET(GetOutputType, 48);
MREM_ORT_OFFSET(KernelCompute, 64);
MREM_ORT_OFFSET(KernelDestroy, 72);
MREM_ORT_OFFSET(GetInputCharacteristic, 80);
MREM_ORT_OFFSET(GetInputMemoryType, 96);
MREM_ORT_OFFSET(GetVariadicInputMinArity, 104);
MREM_ORT_OFFSET(CreateKernelV2, 136);
MREM_ORT_OFFSET(KernelComputeV2, 144);
MREM_ORT_OFFSET(InferOutputShapeFn, 152);
MREM_ORT_OFFSET(GetStartVersion, 160);
MREM_ORT_OFFSET(GetMayInplace, 176);
MREM_ORT_OFFSET(GetAliasMap, 192);
MREM_ORT_OFFSET(ReleaseAliasMap, 200);
static_assert(sizeof(void*) != 8 || sizeof(OrtCustomOp) == 208, "OrtCustomOp");
#undef MREM_ORT_OFFSET
