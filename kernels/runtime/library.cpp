// What the shared library exports: RegisterCustomOps for onnxruntime, three facts for everybody.
#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>
#include <string>
#include <thread>
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

constexpr const char* kThreadsKey = "mrem.threads";
constexpr long kMostThreads = 4096;

// How many threads the sessions of these options have. onnxruntime tells nobody, so whoever makes the options
// may say it in a session config entry; else it is taken to be one for each processor. It decides how work is
// cut, never what comes out.
std::size_t threads_of(const OrtSessionOptions* options, const OrtApi& api) {
    const auto forget = [&](OrtStatus* status) {
        if (status != nullptr) api.ReleaseStatus(status);
        return status == nullptr;
    };
    int given = 0;
    if (!forget(api.HasSessionConfigEntry(options, kThreadsKey, &given)) || given == 0) {
        return std::max(1u, std::thread::hardware_concurrency());
    }
    char text[16] = {};
    std::size_t size = sizeof text;
    const bool read = forget(api.GetSessionConfigEntry(options, kThreadsKey, text, &size));
    char* end = text;
    const long threads = read ? std::strtol(text, &end, 10) : 0;
    if (end == text || *end != '\0' || threads < 1 || threads > kMostThreads) {
        throw Error("mrem.runtime: the session config entry mrem.threads is no number from 1 to " +
                    std::to_string(kMostThreads));
    }
    return static_cast<std::size_t>(threads);
}

// The domain of the operators, one for each number of threads and onnxruntime: a process can have loaded two.
//
// Note: domains and operators are never freed. A session may live as long as the process, past the
// destructors of this library, and calls an operator's functions to the end.
class Domains {
  public:
    OrtStatus* add_to(OrtSessionOptions* options, const OrtApi& api) {
        const std::size_t threads = threads_of(options, api);
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const Entry& entry : entries_) {
            if (entry.api == &api && entry.threads == threads)
                return api.AddCustomOpDomain(options, entry.domain);
        }
        entries_.push_back({&api, threads, nullptr, {}});
        Entry& entry = entries_.back();
        OrtStatus* status = fill(entry);
        if (status == nullptr) return api.AddCustomOpDomain(options, entry.domain);
        if (entry.domain != nullptr) api.ReleaseCustomOpDomain(entry.domain);
        entries_.pop_back();
        return status;
    }

  private:
    struct Entry {
        const OrtApi* api;
        std::size_t threads;
        OrtCustomOpDomain* domain;
        std::vector<const OrtCustomOp*> ops;
    };

    static OrtStatus* fill(Entry& entry) {
        if (OrtStatus* status = entry.api->CreateCustomOpDomain(kDomain, &entry.domain)) return status;
        for (const auto make :
             {new_packed_embedding, new_attention_block, new_feed_forward_block, new_low_bit_linear}) {
            entry.ops.reserve(entry.ops.size() + 1);
            entry.ops.push_back(make(entry.threads));
            if (OrtStatus* status = entry.api->CustomOpDomain_Add(entry.domain, entry.ops.back()))
                return status;
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::list<Entry> entries_;
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
        static Domains& domains = *new Domains;
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
