// The entry that ONNX Runtime calls.
#include <string>

#include "attention_operator.h"
#include "experts_operator.h"
#include "linear_operator.h"
#include "node.h"
#include "path_operators.h"
#include "paths.h"

namespace kvasir {

namespace {

// Of a session's configuration: the path to take, or "auto".
constexpr const char* path_entry = "kvasir.path";

const Path& choose_path(const std::string& wanted) {
    std::string known;
    for (const Candidate& candidate : candidates()) {
        if (candidate.is_usable && (wanted == "auto" || wanted == candidate.path.name))
            return candidate.path;
        if (wanted == candidate.path.name)
            throw Refusal(std::string(path_entry) + " is " + wanted + ", which this CPU cannot run");
        known += std::string(", ") + candidate.path.name;
    }
    throw Refusal(std::string(path_entry) + " is " + wanted + "; it has to be one of auto" + known);
}

std::string wanted_path(const Runtime& runtime, const OrtSessionOptions* options) {
    int is_set = 0;
    check(runtime.HasSessionConfigEntry(options, path_entry, &is_set));
    if (!is_set)
        return "auto";
    size_t size = 0;
    check(runtime.GetSessionConfigEntry(options, path_entry, nullptr, &size));
    std::string value(size, '\0');
    check(runtime.GetSessionConfigEntry(options, path_entry, value.data(), &size));
    value.resize(size - 1);
    return value;
}

// The operators on one path; they outlive every session.
struct Domain {
    Domain(const Runtime& runtime, const Path& path)
        : linears{{runtime, path, Weights::bytes}, {runtime, path, Weights::nibbles}, {runtime, path, Weights::floats}},
          experts{{runtime, path, Weights::bytes}, {runtime, path, Weights::nibbles}, {runtime, path, Weights::floats}},
          attentions{{runtime, path, AttentionOperator::blocks},
                     {runtime, path, AttentionOperator::float_blocks},
                     {runtime, path, AttentionOperator::texts},
                     {runtime, path, AttentionOperator::float_texts},
                     {runtime, path, AttentionOperator::float_rows},
                     {runtime, path, AttentionOperator::byte_rows}},
          small{activation_operator(runtime, path), norm_operator(runtime, path), head_linear_operator(runtime, path),
                convolution_operator(runtime, path), memory_operator(runtime, path)} {
        check(runtime.CreateCustomOpDomain("kvasir", &domain));
        for (const LinearOperator& op : linears)
            check(runtime.CustomOpDomain_Add(domain, &op));
        for (const ExpertsOperator& op : experts)
            check(runtime.CustomOpDomain_Add(domain, &op));
        for (const AttentionOperator& op : attentions)
            check(runtime.CustomOpDomain_Add(domain, &op));
        for (const PathOperator& op : small)
            check(runtime.CustomOpDomain_Add(domain, &op));
    }

    OrtCustomOpDomain* domain = nullptr;
    const LinearOperator linears[3];
    const ExpertsOperator experts[3];
    const AttentionOperator attentions[6];
    const PathOperator small[5];
};

}  // namespace

}  // namespace kvasir

// The name of the path that "auto" takes on this machine.
extern "C" __attribute__((visibility("default"))) const char* KvasirFastestPath() {
    return kvasir::choose_path("auto").name;
}

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
    static const kvasir::Runtime runtime(base->GetApi(ort_api_version));
    return kvasir::guarded(runtime, [&] {
        const kvasir::Path& path = kvasir::choose_path(kvasir::wanted_path(runtime, options));
        // Never freed: sessions hold them.
        auto* const domain = new kvasir::Domain(runtime, path);
        kvasir::check(runtime.AddCustomOpDomain(options, domain->domain));
    });
}
