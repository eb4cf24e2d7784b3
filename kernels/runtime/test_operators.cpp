// Tests of the operators through onnxruntime's C interface, in a small fake of it: what they compute, and
// that everything that does not fit is an error that names the operator and the reason.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "sample_nodes.h"

extern "C" {
OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);
const char* mrem_runtime_version();
const char* mrem_runtime_target();
int mrem_runtime_format();
}

using namespace mrem::runtime;
using namespace mrem::runtime::testing;

extern thread_local long allocations_left;  // test_allocations.cpp

namespace {

struct Generator final : Draw {
    std::mt19937 engine;
    explicit Generator(unsigned seed) : engine(seed) {}
    std::uint32_t next() override { return static_cast<std::uint32_t>(engine()); }
};

unsigned seed_now = 0;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "FAILED: %s (seed %u)\n", what.c_str(), seed_now);
    std::exit(1);
}

// The message of an error, released; empty for none.
std::string message(OrtStatus* status) {
    if (status == nullptr) return "";
    const std::string text = fake_ort::api().GetErrorMessage(status);
    fake_ort::api().ReleaseStatus(status);
    return text.empty() ? "an error without a message" : text;
}

void expect_error(Sample& sample, const std::string& part) {
    const std::string found = message(run_node(sample));
    if (found.find(part) == std::string::npos)
        fail("expected an error with \"" + part + "\", found \"" + found + "\"");
    if (found.find("mrem.runtime") == std::string::npos)
        fail("the error does not name the operator: " + found);
}

void check_result(const Sample& sample, bool exact) {
    const OrtValue& output = sample.context.output;
    if (output.dims != sample.dims) fail("the output has another shape");
    std::vector<float> expected(output.bytes / sizeof(float)), found(expected.size());
    if (!expected.empty()) sample.expected(expected.data());
    if (!found.empty()) std::memcpy(found.data(), output.data.get(), output.bytes);
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const bool same = std::memcmp(&found[i], &expected[i], sizeof(float)) == 0;
        if (same || (!exact && std::abs(found[i] - expected[i]) < 1e-2f)) continue;
        fail(std::string(sample.op->GetName(sample.op)) + ": element " + std::to_string(i) + " is " +
             std::to_string(found[i]) + " instead of " + std::to_string(expected[i]));
    }
}

// Attention on floats sums them in another order than the plain version; all else is equal bit for bit.
bool is_exact(const Sample& sample) {
    const auto attention = sample.info.texts.find("attention");
    return attention == sample.info.texts.end() || attention->second == "int8";
}

void test_values() {
    for (unsigned seed = 0; seed < 600; ++seed) {
        seed_now = seed;
        Generator draw(seed);
        Sample sample;
        draw_node(sample, draw);
        sample.context.threads = seed % 5 == 0 ? 3 : 1;
        const std::string problem = message(run_node(sample));
        if (!problem.empty()) fail(problem);
        check_result(sample, is_exact(sample));
    }
}

// One kernel, several calls at once, as with one session in several threads.
void test_calls_at_once() {
    for (unsigned seed = 0; seed < 24; ++seed) {
        seed_now = seed;
        Generator draw(seed);
        Sample sample;
        draw_node(sample, draw);
        void* kernel = nullptr;
        if (sample.op->CreateKernelV2(sample.op, &fake_ort::api(), &sample.info, &kernel) != nullptr)
            fail("no kernel");
        std::vector<std::vector<float>> found(4);
        std::vector<std::thread> callers;
        for (std::vector<float>& y : found) {
            callers.emplace_back([&sample, &y, kernel] {
                OrtKernelContext context;
                context.inputs = sample.context.inputs;
                context.threads = 2;
                if (sample.op->KernelComputeV2(kernel, &context) != nullptr) fail("an error in a thread");
                y.resize(context.output.bytes / sizeof(float));
                if (!y.empty()) std::memcpy(y.data(), context.output.data.get(), context.output.bytes);
            });
        }
        for (std::thread& caller : callers) caller.join();
        sample.op->KernelDestroy(kernel);
        for (const std::vector<float>& y : found) {
            if (y.size() != found[0].size() ||
                (!y.empty() && std::memcmp(y.data(), found[0].data(), y.size() * sizeof(float)) != 0)) {
                fail("calls at the same time differ");
            }
        }
    }
}

using Make = void (*)(Sample&, Draw&);
const std::pair<Make, std::size_t> kOperators[] = {
    {draw_linear, 1}, {draw_attention, 2}, {draw_feed_forward, 2}, {draw_embedding, 4}};  // first constant

void test_attributes() {
    for (const auto& [make, first] : kOperators) {
        Generator draw(3);
        Sample sample;
        sample.info.integers["format"] = kFormat;
        do {
            sample.info = OrtKernelInfo{};
            sample.values.clear();
            sample.context.inputs.clear();
            sample.info.integers["format"] = kFormat;
            make(sample, draw);
        } while (!is_exact(sample));
        const OrtKernelInfo whole = sample.info;
        for (const auto& [name, value] : whole.integers) {
            sample.info = whole;
            sample.info.integers.erase(name);
            expect_error(sample, name);
            for (const std::int64_t bad :
                 {INT64_MIN, std::int64_t{-1000000}, std::int64_t{1000000000000}, INT64_MAX}) {
                sample.info = whole;
                sample.info.integers[name] = bad;
                expect_error(sample, name == "format" ? "format" : name + " is " + std::to_string(bad));
            }
        }
        for (const auto& [name, value] : whole.floats) {
            sample.info = whole;
            sample.info.floats.erase(name);
            expect_error(sample, name);
            for (const float bad : {HUGE_VALF, -HUGE_VALF, NAN}) {
                sample.info = whole;
                sample.info.floats[name] = bad;
                expect_error(sample, name + " is not finite");
            }
            if (name.find("_scale") == std::string::npos) continue;
            for (const float bad : {0.0f, -0.5f}) {
                sample.info.floats[name] = bad;
                expect_error(sample, name);
            }
        }
        for (const auto& [name, value] : whole.texts) {
            for (const char* bad : {"", "int4", "int8 "}) {
                sample.info = whole;
                sample.info.texts[name] = bad;
                expect_error(sample, name);
            }
            sample.info.texts[name] = std::string(100000, 'x');
            expect_error(sample, name);
        }
        sample.info = whole;
        sample.info.integers["format"] = kFormat + 1;
        expect_error(sample, "made by a newer mrem_deploy; update mrem-runtime");
    }
}

void test_constants() {
    for (const auto& [make, first] : kOperators) {
        for (std::size_t index = first; index < 13; ++index) {
            for (int change = 0; change < 6; ++change) {
                Generator draw(5);
                Sample sample;
                do {
                    sample.info = OrtKernelInfo{};
                    sample.values.clear();
                    sample.context.inputs.clear();
                    sample.info.integers["format"] = kFormat;
                    make(sample, draw);  // an embedding with everything
                } while (make == draw_embedding &&
                         (sample.context.inputs.size() < 13 || sample.info.constants.count(7) == 0));
                const auto found = sample.info.constants.find(index);
                if (found == sample.info.constants.end()) continue;
                OrtValue changed;
                fake_ort::resize(changed, found->second->type, found->second->dims);
                std::memset(changed.data.get(), 0, changed.bytes);
                const bool table = make == draw_embedding;
                std::string part = "input " + std::to_string(index);
                if (change == 0) {                      // an input of the graph instead
                    if (table && index == 7) continue;  // then the model has no types, which is allowed
                    sample.info.constants.erase(index);
                } else if (change == 1) {
                    fake_ort::resize(changed, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, changed.dims);
                } else if (change == 2) {  // one row less: the tables that belong to it do not fit any more
                    std::vector<std::int64_t> dims = changed.dims;
                    --dims[0];
                    if (table) part = "input";
                    if (table && (index == 6 || index == 7) && dims[0] > 0) continue;  // a smaller table
                    fake_ort::resize(changed, changed.type, dims);
                } else if (change == 3) {
                    std::vector<std::int64_t> dims = changed.dims;
                    dims.push_back(1);
                    fake_ort::resize(changed, changed.type, dims);
                } else if (change == 4) {
                    fake_ort::resize(changed, changed.type, {});
                } else {
                    fake_ort::resize(changed, changed.type, {0});
                }
                if (change != 0) sample.info.constants[index] = &changed;
                expect_error(sample, part);
            }
        }
    }
}

void test_inputs() {
    constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    for (const auto& [make, first] : kOperators) {
        for (std::size_t index = 0; index < first; ++index) {
            const std::string part = "input " + std::to_string(index);
            for (int change = 0; change < 7; ++change) {
                Generator draw(9);
                Sample sample;
                do {
                    sample.info = OrtKernelInfo{};
                    sample.values.clear();
                    sample.context.inputs.clear();
                    sample.info.integers["format"] = kFormat;
                    make(sample, draw);
                } while (sample.context.inputs[0]->bytes == 0 ||
                         (make == draw_embedding && sample.context.inputs[3] == nullptr));
                const OrtValue* given = sample.context.inputs[index];
                OrtValue changed;
                const auto type = given->type;
                std::vector<std::int64_t> dims = given->dims;
                if (change == 0) {
                    if (make == draw_embedding && index == 3) continue;  // may be absent
                    sample.context.inputs[index] = nullptr;
                    expect_error(sample, part);
                    continue;
                }
                if (change == 1) fake_ort::resize(changed, type == kFloat ? kInt64 : kFloat, dims);
                if (change == 2) fake_ort::resize(changed, type, {});
                if (change == 3)
                    dims.insert(dims.begin(), 2), dims.insert(dims.begin(), 2),
                        fake_ort::resize(changed, type, dims);
                if (change == 4) dims.back() += 1, fake_ort::resize(changed, type, dims);
                if (change == 5) dims.back() = 0, fake_ort::resize(changed, type, dims);
                if (change == 6) dims.front() += 1, fake_ort::resize(changed, type, dims);
                const bool any_rows = make == draw_linear && (change == 3 || change == 6);
                if (any_rows) continue;  // another number of rows is fine
                std::memset(changed.data.get(), 0, changed.bytes);
                sample.context.inputs[index] = &changed;
                expect_error(sample, "input");
            }
        }
    }
}

void test_ids() {
    for (const std::size_t index : {0, 2, 3}) {
        for (const std::int64_t bad : {std::int64_t{-1}, INT64_MIN, INT64_MAX, std::int64_t{1000}}) {
            for (unsigned seed = 0; seed < 30; ++seed) {
                seed_now = seed;
                Generator draw(seed);
                Sample sample;
                sample.info.integers["format"] = kFormat;
                draw_embedding(sample, draw);
                OrtValue* ids = const_cast<OrtValue*>(sample.context.inputs[index]);
                if (ids == nullptr || ids->bytes == 0 || sample.context.inputs[0]->bytes == 0) continue;
                const std::size_t count = ids->bytes / 8, place = draw.below(count);
                std::memcpy(ids->data.get() + 8 * place, &bad, 8);
                bool read = false;  // by some token whose mask is not 0
                const std::size_t tokens = sample.context.inputs[0]->bytes / 8;
                for (std::size_t i = 0; i < tokens; ++i)
                    read |= i % count == place && input_ids(sample, 1)[i] != 0;
                if (read) {
                    expect_error(sample, "has the value " + std::to_string(bad));
                } else if (const std::string problem = message(run_node(sample)); !problem.empty()) {
                    fail("an id of padding is read: " + problem);
                }
            }
        }
    }
}

void test_hot_rows_out_of_range() {
    for (unsigned seed = 0; seed < 40; ++seed) {
        Generator draw(seed_now = seed);
        Sample sample;
        sample.info.integers["format"] = kFormat;
        draw_embedding(sample, draw);
        if (sample.context.inputs.size() < 13) continue;
        auto* place = const_cast<OrtValue*>(sample.context.inputs[10]);
        std::memset(place->data.get() + place->bytes - 1, 0x7f, 1);
        expect_error(sample, "hot_place");
    }
}

// Every call into onnxruntime fails once, and every allocation: an error, no leak, and afterwards all is
// well.
void test_failures() {
    for (const auto& [make, first] : kOperators) {
        Generator draw(seed_now = 11);
        Sample sample;
        do {
            sample.info = OrtKernelInfo{};
            sample.values.clear();
            sample.context.inputs.clear();
            sample.info.integers["format"] = kFormat;
            make(sample, draw);
        } while (sample.context.inputs[0]->bytes == 0);
        long calls = 0;
        for (;; ++calls) {
            fake_ort::fail_at = calls;
            const std::string problem = message(run_node(sample));
            const bool reached = fake_ort::fail_at < 0;
            fake_ort::fail_at = -1;
            if (!reached) break;
            // The name of the node may be missing, and so may what is optional; all else is an error.
            if (problem.empty() && calls > 2 && make != draw_embedding) fail("a failed call was not noticed");
        }
        for (long n = 0;; ++n) {
            allocations_left = n;
            OrtStatus* status = run_node(sample);
            const bool reached = allocations_left < 0;
            allocations_left = -1;
            const std::string problem = message(status);
            if (!reached) {
                if (!problem.empty()) fail(problem);
                break;
            }
        }
        const std::string problem = message(run_node(sample));
        if (!problem.empty()) fail("after failures: " + problem);
        check_result(sample, is_exact(sample));
        std::printf("  %s: %ld calls of onnxruntime failed\n", sample.op->GetName(sample.op), calls);
    }
}

void test_registration() {
    OrtSessionOptions options, more;
    if (!message(RegisterCustomOps(&options, &fake_ort::base())).empty()) fail("registration");
    if (!message(RegisterCustomOps(&more, &fake_ort::base())).empty()) fail("a second registration");
    if (options.domains.size() != 1 || more.domains != options.domains) fail("domains");
    const OrtCustomOpDomain& domain = *options.domains[0];
    if (domain.name != "mrem.runtime" || domain.ops.size() != 4) fail("the domain");
    for (const OrtCustomOp* op : domain.ops) {
        if (op->version != kApiVersion || op->GetOutputTypeCount(op) != 1 || op->GetInputTypeCount(op) < 4)
            fail("an operator");
    }
    for (const char* threads : {"1", "64"}) {
        more.entries["mrem.threads"] = threads;
        if (!message(RegisterCustomOps(&more, &fake_ort::base())).empty()) fail("registration with threads");
    }
    if (more.domains.size() != 3 || more.domains[1] == more.domains[2]) fail("domains by threads");
    for (const char* wrong : {"", "0", "-1", "2 ", "many", "99999", "123456789012345678901234567890"}) {
        more.entries["mrem.threads"] = wrong;
        const std::string found = message(RegisterCustomOps(&more, &fake_ort::base()));
        if (found.find("mrem.threads") == std::string::npos) fail("wrong threads: " + found);
    }
    fake_ort::version = 16;
    const std::string old = message(RegisterCustomOps(&options, &fake_ort::base()));
    fake_ort::version = 23;
    if (old != "mrem-runtime needs onnxruntime 1.17 or newer; this is 1.fake")
        fail("an old onnxruntime: " + old);
    if (std::strlen(mrem_runtime_version()) < 5 || mrem_runtime_format() != 1) fail("the facts");
    std::printf("  version %s, target %s\n", mrem_runtime_version(), mrem_runtime_target());
}

}  // namespace

int main() {
    test_registration();
    test_values();
    test_calls_at_once();
    test_attributes();
    test_constants();
    test_inputs();
    test_ids();
    test_hot_rows_out_of_range();
    test_failures();
    std::puts("operators: ok");
    return 0;
}
