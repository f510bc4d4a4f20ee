#include "node.h"

namespace kvasir {

size_t Tensor::count() const {
    size_t product = 1;
    for (int64_t dimension : shape)
        product *= size_t(dimension);
    return product;
}

std::string describe(const Shape& shape) {
    std::string text;
    for (int64_t dimension : shape)
        text += (text.empty() ? "" : ", ") + std::to_string(dimension);
    return "[" + text + "]";
}

std::string describe(const Tensor& tensor) {
    const char* const type = tensor.type == element_float     ? "float"
                             : tensor.type == element_int8    ? "int8"
                             : tensor.type == element_uint8   ? "uint8"
                             : tensor.type == element_int32   ? "int32"
                             : tensor.type == element_int64   ? "int64"
                             : tensor.type == element_float16 ? "float16"
                                                              : "another type";
    return type + describe(tensor.shape);
}

Tensor tensor_of(const Runtime& runtime, const OrtValue* value) {
    Tensor tensor;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(runtime.GetTensorTypeAndShape(value, &info));
    size_t rank = 0;
    OrtStatus* status = runtime.GetTensorElementType(info, &tensor.type);
    if (!status)
        status = runtime.GetDimensionsCount(info, &rank);
    tensor.shape.resize(rank);
    if (!status)
        status = runtime.GetDimensions(info, tensor.shape.data(), rank);
    runtime.ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    void* data = nullptr;
    check(runtime.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
}

bool Node::has_input(size_t index) const {
    size_t count = 0, size = 0;
    check(runtime.KernelInfo_GetInputCount(info, &count));
    if (index >= count)
        return false;
    check(runtime.KernelInfo_GetInputName(info, index, nullptr, &size));
    return size > 1;  // with the zero at its end
}

Tensor Node::constant(size_t index, const char* input) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    if (has_input(index))
        check(runtime.KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value));
    if (!is_constant || !value)
        refuse(std::string(input) + " has to be an initializer");
    return tensor_of(runtime, value);
}

int64_t Node::integer(const char* attribute, int64_t absent) const {
    int64_t value = absent;
    if (!succeeds(runtime.KernelInfoGetAttribute_int64(info, attribute, &value)))
        refuse_other_type(attribute, "an int");
    return value;
}

float Node::number(const char* attribute, float absent) const {
    float value = absent;
    if (!succeeds(runtime.KernelInfoGetAttribute_float(info, attribute, &value)))
        refuse_other_type(attribute, "a float");
    return value;
}

bool Node::flag(const char* attribute) const {
    const int64_t value = integer(attribute, 0);
    if (value != 0 && value != 1)
        refuse(std::string("the attribute ") + attribute + " is " + std::to_string(value) + "; it has to be 0 or 1");
    return value == 1;
}

std::string Node::text(const char* attribute) const {
    size_t size = 0;
    if (!succeeds(runtime.KernelInfoGetAttribute_string(info, attribute, nullptr, &size))) {
        refuse_other_type(attribute, "a string");
        return "";
    }
    std::string value(size, '\0');
    check(runtime.KernelInfoGetAttribute_string(info, attribute, value.data(), &size));
    value.resize(size - 1);
    return value;
}

bool Node::succeeds(OrtStatus* status) const {
    if (status)
        runtime.ReleaseStatus(status);
    return !status;
}

// The runtime says the same of an attribute that is missing and of one with another type.
void Node::refuse_other_type(const char* attribute, const char* expected) const {
    int64_t integer;
    float number;
    size_t size = 0;
    if (succeeds(runtime.KernelInfoGetAttribute_int64(info, attribute, &integer)) ||
        succeeds(runtime.KernelInfoGetAttribute_float(info, attribute, &number)) ||
        succeeds(runtime.KernelInfoGetAttribute_string(info, attribute, nullptr, &size)))
        refuse(std::string("the attribute ") + attribute + " has to be " + expected);
}

}  // namespace kvasir
