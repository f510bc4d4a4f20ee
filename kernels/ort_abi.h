// The part of ONNX Runtime's C ABI that this library uses, declared here because no package ships its header.
//
// OrtApi is a table of function pointers to which versions only append. The number before a function is its
// position. The order is public: microsoft/onnxruntime, csharp/src/Microsoft.ML.OnnxRuntime/NativeMethods.shared.cs.
// A wrong position crashes, so library.py calls all of them in a process of its own before a model is opened.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtStatus;  // null is success
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version);  // null if the runtime is older
    const char* (*GetVersionString)();
};

// The first version that has all functions below (1.17, of January 2024).
constexpr uint32_t ort_api_version = 17;

// ONNXTensorElementDataType, as TensorProto.DataType of onnx.proto.
enum ElementType : int {
    element_any = 0,
    element_float = 1,
    element_uint8 = 2,
    element_int8 = 3,
    element_int32 = 6,
    element_int64 = 7,
    element_float16 = 10
};

// OrtErrorCode.
enum ErrorCode : int { error_fail = 1, error_invalid_argument = 2, error_invalid_graph = 10 };

// OrtCustomOpInputOutputCharacteristic.
enum Characteristic : int { required = 0, optional = 1 };

// Members after the last one are read only of later versions than `version` says.
struct OrtCustomOp {
    uint32_t version = 16;
    void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*) = nullptr;
    const char* (*GetName)(const OrtCustomOp*) = nullptr;
    const char* (*GetExecutionProviderType)(const OrtCustomOp*) = nullptr;  // of null: the CPU
    ElementType (*GetInputType)(const OrtCustomOp*, size_t) = nullptr;
    size_t (*GetInputTypeCount)(const OrtCustomOp*) = nullptr;
    ElementType (*GetOutputType)(const OrtCustomOp*, size_t) = nullptr;
    size_t (*GetOutputTypeCount)(const OrtCustomOp*) = nullptr;
    void (*KernelCompute)(void*, OrtKernelContext*) = nullptr;
    void (*KernelDestroy)(void*) = nullptr;
    Characteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t) = nullptr;
    Characteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t) = nullptr;
    int (*GetInputMemoryType)(const OrtCustomOp*, size_t) = nullptr;
    int (*GetVariadicInputMinArity)(const OrtCustomOp*) = nullptr;
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp*) = nullptr;
    int (*GetVariadicOutputMinArity)(const OrtCustomOp*) = nullptr;
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*) = nullptr;
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**) = nullptr;
    OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*) = nullptr;
};

#define ORT_FUNCTION(position, result, name, ...) \
    result (*const name)(__VA_ARGS__) = reinterpret_cast<result (*)(__VA_ARGS__)>(table[position])

// The functions by their names.
namespace kvasir {

struct Runtime {
    explicit Runtime(const OrtApi* api) : table(reinterpret_cast<void* const*>(api)) {}

    void* const* table;
    ORT_FUNCTION(0, OrtStatus*, CreateStatus, ErrorCode, const char* message);
    ORT_FUNCTION(26, OrtStatus*, CreateCustomOpDomain, const char* name, OrtCustomOpDomain**);
    ORT_FUNCTION(27, OrtStatus*, CustomOpDomain_Add, OrtCustomOpDomain*, const OrtCustomOp*);
    ORT_FUNCTION(28, OrtStatus*, AddCustomOpDomain, OrtSessionOptions*, OrtCustomOpDomain*);
    ORT_FUNCTION(51, OrtStatus*, GetTensorMutableData, OrtValue*, void**);
    ORT_FUNCTION(60, OrtStatus*, GetTensorElementType, const OrtTensorTypeAndShapeInfo*, ElementType*);
    ORT_FUNCTION(61, OrtStatus*, GetDimensionsCount, const OrtTensorTypeAndShapeInfo*, size_t*);
    ORT_FUNCTION(62, OrtStatus*, GetDimensions, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t);
    ORT_FUNCTION(65, OrtStatus*, GetTensorTypeAndShape, const OrtValue*, OrtTensorTypeAndShapeInfo**);
    ORT_FUNCTION(85, OrtStatus*, KernelInfoGetAttribute_float, const OrtKernelInfo*, const char*, float*);
    ORT_FUNCTION(86, OrtStatus*, KernelInfoGetAttribute_int64, const OrtKernelInfo*, const char*, int64_t*);
    ORT_FUNCTION(87, OrtStatus*, KernelInfoGetAttribute_string, const OrtKernelInfo*, const char*, char*, size_t*);
    ORT_FUNCTION(90, OrtStatus*, KernelContext_GetInput, const OrtKernelContext*, size_t, const OrtValue**);
    ORT_FUNCTION(91, OrtStatus*, KernelContext_GetOutput, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**);
    ORT_FUNCTION(93, void, ReleaseStatus, OrtStatus*);
    ORT_FUNCTION(99, void, ReleaseTensorTypeAndShapeInfo, OrtTensorTypeAndShapeInfo*);
    ORT_FUNCTION(230, OrtStatus*, KernelInfo_GetInputCount, const OrtKernelInfo*, size_t*);
    ORT_FUNCTION(232, OrtStatus*, KernelInfo_GetInputName, const OrtKernelInfo*, size_t, char*, size_t*);
    ORT_FUNCTION(237, OrtStatus*, HasSessionConfigEntry, const OrtSessionOptions*, const char*, int*);
    ORT_FUNCTION(238, OrtStatus*, GetSessionConfigEntry, const OrtSessionOptions*, const char*, char*, size_t*);
    ORT_FUNCTION(249, OrtStatus*, KernelInfoGetConstantInput_tensor, const OrtKernelInfo*, size_t, int*, const OrtValue**);
    ORT_FUNCTION(274, OrtStatus*, KernelContext_ParallelFor, const OrtKernelContext*, void (*)(void*, size_t), size_t total,
                 size_t batches, void* data);
};

}  // namespace kvasir

#undef ORT_FUNCTION
