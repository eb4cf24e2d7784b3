// What the shared library exports: RegisterCustomOps for onnxruntime, three facts for everybody.
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "active.h"
#include "operators/operator.h"
#include "targets.h"

#if defined(_WIN32)
#define MREM_EXPORT extern "C" __declspec(dllexport)
#else
#define MREM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace mrem::runtime {
namespace {

constexpr const char* kDomain = "mrem.runtime";
constexpr const char* kOldest = "1.17";

// The domain of the operators, one for each onnxruntime in this process: a process can have loaded two.
class Domains {
  public:
    ~Domains() {
        for (const Entry& entry : entries_) entry.api->ReleaseCustomOpDomain(entry.domain);
    }

    OrtStatus* add_to(OrtSessionOptions* options, const OrtApi& api) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const Entry& entry : entries_) {
            if (entry.api == &api) return api.AddCustomOpDomain(options, entry.domain);
        }
        OrtCustomOpDomain* domain = nullptr;
        entries_.reserve(entries_.size() + 1);
        if (OrtStatus* status = api.CreateCustomOpDomain(kDomain, &domain)) return status;
        for (const OrtCustomOp* op :
             {&packed_embedding(), &attention_block(), &feed_forward_block(), &low_bit_linear()}) {
            if (OrtStatus* status = api.CustomOpDomain_Add(domain, op)) {
                api.ReleaseCustomOpDomain(domain);
                return status;
            }
        }
        entries_.push_back({&api, domain});
        return api.AddCustomOpDomain(options, domain);
    }

  private:
    struct Entry {
        const OrtApi* api;
        OrtCustomOpDomain* domain;
    };
    std::mutex mutex_;
    std::vector<Entry> entries_;
};

// Too old: says so by the entries that every version has.
OrtStatus* too_old(const OrtApiBase& base) {
    const OrtApi* first = base.GetApi(1);
    if (first == nullptr) return nullptr;
    const std::string found = base.GetVersionString == nullptr ? "older" : base.GetVersionString();
    return first->CreateStatus(
        ORT_NOT_IMPLEMENTED,
        ("mrem-runtime needs onnxruntime " + std::string(kOldest) + " or newer; this is " + found).c_str());
}

}  // namespace
}  // namespace mrem::runtime

MREM_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    using namespace mrem::runtime;
    if (base == nullptr) return nullptr;
    const OrtApi* api = base->GetApi(kApiVersion);
    if (api == nullptr) return too_old(*base);
    return guarded(*api, [&] {
        std::string problem;
        if (choose_target(&problem) == nullptr) throw Error("mrem.runtime: " + problem);
        static Domains domains;
        if (OrtStatus* status = domains.add_to(options, *api)) {
            const std::string message = api->GetErrorMessage(status);
            api->ReleaseStatus(status);
            throw Error("mrem.runtime: " + message);
        }
    });
}

MREM_EXPORT const char* mrem_runtime_version() { return MREM_RUNTIME_VERSION; }
// Null if MREM_CPU_TARGET names none that can run here.
MREM_EXPORT const char* mrem_runtime_target() {
    try {
        std::string problem;
        const mrem::runtime::Target* target = mrem::runtime::choose_target(&problem);
        return target == nullptr ? nullptr : target->name();
    } catch (...) {
        return nullptr;
    }
}
MREM_EXPORT int mrem_runtime_format() { return static_cast<int>(mrem::runtime::kFormat); }
