// Any attributes, shapes and bytes into the operators, for libFuzzer, through a small fake of onnxruntime:
// `make fuzz` builds and runs it with clang. Tensors are heap blocks of exactly their size.
//
// The first bytes of an input say what is changed in a node that is valid otherwise; the others, and when
// they are used up a generator, draw that node. A node whose attributes and shapes stay must compute what the
// plain version does, whatever bytes its tensors hold, or be refused for an id or a row out of range.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sample_nodes.h"

using namespace mrem::runtime;
using namespace mrem::runtime::testing;

namespace {

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::abort();
}

class Input final : public Draw {
  public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {
        for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ data[i]) * 0x100000001b3u;
    }
    std::uint8_t byte() {
        if (left_ == 0) return 0;
        --left_;
        return *data_++;
    }
    std::uint32_t next() override {
        if (left_ != 0) {
            const std::uint32_t low = byte();
            return low | static_cast<std::uint32_t>(byte()) << 8;
        }
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::uint32_t>(state_ >> 33);
    }

  private:
    const std::uint8_t* data_;
    std::size_t left_;
    std::uint64_t state_ = 0xcbf29ce484222325u;
};

struct Change {
    std::uint8_t kind, which, how, value;
};

constexpr std::int64_t kIntegers[] = {INT64_MIN,
                                      -1000000,
                                      -129,
                                      -8,
                                      -3,
                                      -2,
                                      -1,
                                      0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      5,
                                      7,
                                      8,
                                      9,
                                      15,
                                      16,
                                      17,
                                      31,
                                      32,
                                      33,
                                      63,
                                      64,
                                      65,
                                      127,
                                      128,
                                      129,
                                      255,
                                      256,
                                      257,
                                      1000,
                                      32768,
                                      65536,
                                      65537,
                                      1 << 24,
                                      std::int64_t{1} << 31,
                                      std::int64_t{1} << 32,
                                      std::int64_t{1} << 62,
                                      INT64_MAX};
const float kFloats[] = {0.0f,  -0.0f,  1e-45f, 1e-38f,     -1e-38f,     1e-20f,    1e-4f,      0.5f, 1.0f,
                         -1.0f, 255.0f, 1e10f,  3.4028e38f, -3.4028e38f, HUGE_VALF, -HUGE_VALF, NAN};
constexpr ONNXTensorElementDataType kTypes[] = {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,     ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64};
constexpr std::size_t kMostBytes = 1 << 20;

template <class T, std::size_t N>
T pick(const T (&all)[N], std::uint8_t which) {
    return all[which % N];
}

template <class Map>
auto entry(Map& map, std::uint8_t which) {
    auto found = map.begin();
    if (!map.empty()) std::advance(found, which % map.size());
    return found;
}

void fill(OrtValue& value, std::uint8_t how, Input& input) {
    for (std::size_t i = 0; i < value.bytes; ++i) {
        value.data[i] = how == 0 ? 0 : how == 1 ? 0xff : static_cast<std::uint8_t>(input.next());
    }
}

// New dimensions or another type; the content is filled again.
void reshape(OrtValue& value, Change change, Input& input) {
    std::vector<std::int64_t> dims = value.dims;
    ONNXTensorElementDataType type = value.type;
    const std::size_t place = dims.empty() ? 0 : change.value % dims.size();
    switch (change.how % 7) {
        case 0:
            type = pick(kTypes, change.value);
            break;
        case 1:
            dims.push_back(change.value % 3);
            break;
        case 2:
            if (!dims.empty()) dims.pop_back();
            break;
        case 3:
            if (!dims.empty()) dims[place] += change.value % 5 - 2;
            break;
        case 4:
            if (!dims.empty()) dims[place] = pick(kIntegers, change.which);
            break;
        case 5:
            dims.assign(change.value % 5, change.which % 3);
            break;
        default:
            if (!dims.empty()) std::swap(dims[0], dims.back());
    }
    std::size_t bytes = fake_ort::element_size(type);
    bool empty = false;
    for (std::int64_t& dim : dims) {
        if (dim < 0) dim = 0;  // onnxruntime has no tensors with negative dimensions
        empty |= dim == 0;
    }
    for (const std::int64_t dim : dims) {
        if (!empty && bytes > kMostBytes / static_cast<std::size_t>(dim)) return;  // and no memory for these
        bytes *= static_cast<std::size_t>(dim);
    }
    value.type = type;
    value.dims = dims;
    value.bytes = empty ? 0 : bytes;
    value.data.reset(new std::uint8_t[value.bytes]);
    fill(value, change.which % 3, input);
}

// Whether the node still is what `sample.expected` computes, apart from the content of its tensors.
bool apply(Change change, Sample& sample, Input& input) {
    OrtKernelInfo& info = sample.info;
    auto& inputs = sample.context.inputs;
    if (inputs.empty()) return false;  // they were all taken away
    auto* value = const_cast<OrtValue*>(inputs[change.which % inputs.size()]);
    switch (change.kind % 12) {
        case 0:
            if (auto found = entry(info.integers, change.which); found != info.integers.end()) {
                found->second = pick(kIntegers, change.value);
            }
            return false;
        case 1:
            if (!info.integers.empty()) info.integers.erase(entry(info.integers, change.which));
            return false;
        case 2:
            if (auto found = entry(info.floats, change.which); found != info.floats.end()) {
                found->second = pick(kFloats, change.value);
            }
            return false;
        case 3:
            if (!info.floats.empty()) info.floats.erase(entry(info.floats, change.which));
            return false;
        case 4:
            info.texts["attention"] = change.how % 3 == 0   ? "float"
                                      : change.how % 3 == 1 ? "int8"
                                                            : std::string(change.value * 16u, 'x');
            return false;
        case 5:
            info.constants.erase(change.which % 13);
            return false;
        case 6:
            if (value != nullptr) info.constants[change.which % inputs.size()] = value;
            return false;
        case 7:
            inputs[change.which % inputs.size()] = nullptr;
            return false;
        case 8:
            inputs.resize(change.value % 14, nullptr);
            return false;
        case 9:
            if (value != nullptr) reshape(*value, change, input);
            return false;
        case 10:  // any bytes
            if (value != nullptr) fill(*value, change.how % 3, input);
            return true;
        default:  // one number
            if (value != nullptr && value->bytes >= 8) {
                const std::size_t size = fake_ort::element_size(value->type), count = value->bytes / size;
                const std::int64_t integer = pick(kIntegers, change.value);
                const float number = pick(kFloats, change.value);
                const void* from = &integer;
                if (value->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) from = &number;
                std::memcpy(value->data.get() + change.how % count * size, from, size);
            }
            return true;
    }
}

void compare(const Sample& sample) {
    const OrtValue& output = sample.context.output;
    if (output.dims != sample.dims) fail("another shape");
    const std::size_t count = output.bytes / sizeof(float);
    std::vector<float> expected(count), found(count);
    if (count == 0) return;
    sample.expected(expected.data());
    std::memcpy(found.data(), output.data.get(), output.bytes);
    for (std::size_t i = 0; i < count; ++i) {
        if (std::memcmp(&expected[i], &found[i], sizeof(float)) == 0) continue;
        if (std::isnan(expected[i]) && std::isnan(found[i])) continue;
        std::fprintf(stderr, "%s: element %zu is %.9g instead of %.9g\n", sample.op->GetName(sample.op), i,
                     static_cast<double>(found[i]), static_cast<double>(expected[i]));
        fail("another value than the plain version");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    Change changes[3];
    const std::size_t count = input.byte() % 4, threads = input.byte() % 32 == 1 ? 2 : 1;
    for (Change& change : changes) {
        change.kind = input.byte();
        change.which = input.byte();
        change.how = input.byte();
        change.value = input.byte();
    }
    Sample sample;
    draw_node(sample, input);
    bool same = true;
    for (std::size_t i = 0; i < count; ++i) same = apply(changes[i], sample, input) && same;
    sample.context.threads = threads;
    OrtStatus* status = run_node(sample);
    if (status == nullptr) {
        if (same) compare(sample);
        return 0;
    }
    if (count == 0) fail(status->message.c_str());
    if (status->message.find("mrem.runtime") == std::string::npos)
        fail("an error without the operator's name");
    fake_ort::api().ReleaseStatus(status);
    return 0;
}
