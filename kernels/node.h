// What a kernel learns of its node and of its values. Each function refuses what it cannot use by throwing.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace kvasir {

using Shape = std::vector<int64_t>;

// A graph that the contract does not allow; what() says what was found and what was expected.
struct Refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The runtime's own refusal.
struct Failure {
    OrtStatus* status;
};

struct Tensor {
    ElementType type;
    Shape shape;
    const void* data;

    const float* floats() const { return static_cast<const float*>(data); }
    const int32_t* ints() const { return static_cast<const int32_t*>(data); }
    size_t count() const;
};

std::string describe(const Shape&);  // such as [2, 3]
std::string describe(const Tensor&);  // such as float[2, 3]

// Turn what a body throws into a status: no exception may leave a function that the runtime calls.
template <class Body>
OrtStatus* guarded(const Runtime& runtime, Body body) {
    try {
        body();
        return nullptr;
    } catch (const Failure& failure) {
        return failure.status;
    } catch (const Refusal& refusal) {
        return runtime.CreateStatus(error_invalid_graph, refusal.what());
    } catch (const std::exception& error) {
        return runtime.CreateStatus(error_fail, error.what());
    }
}

inline void check(OrtStatus* status) {
    if (status)
        throw Failure{status};
}

Tensor tensor_of(const Runtime&, const OrtValue*);

// A node when its kernel is made.
class Node {
public:
    Node(const Runtime& runtime, const OrtKernelInfo* info, std::string name)
        : runtime(runtime), info(info), name(std::move(name)) {}

    bool has_input(size_t index) const;
    // The value of an input that has to be an initializer.
    Tensor constant(size_t index, const char* input) const;

    // Attributes; one that is not there has the value given here.
    int64_t integer(const char* attribute, int64_t absent) const;
    float number(const char* attribute, float absent) const;
    bool flag(const char* attribute) const;  // 0 or 1
    std::string text(const char* attribute) const;
    // The value of an enumeration with this name.
    template <class Value, size_t count>
    Value choice(const char* attribute, const char* const (&names)[count]) const {
        const std::string given = text(attribute);
        std::string known;
        for (size_t i = 0; i < count; ++i) {
            if (given == names[i])
                return Value(i);
            known += (i ? ", \"" : "\"") + std::string(names[i]) + "\"";
        }
        refuse(std::string("the attribute ") + attribute + " is \"" + given + "\"; it has to be one of " + known);
    }

    [[noreturn]] void refuse(const std::string& what) const { throw Refusal("kvasir." + name + ": " + what); }

private:
    bool succeeds(OrtStatus*) const;
    void refuse_other_type(const char* attribute, const char* expected) const;

    const Runtime& runtime;
    const OrtKernelInfo* info;
    const std::string name;
};

}  // namespace kvasir
