// The only file that knows Python. It checks what memory safety needs and releases the GIL around the
// kernels; mrem_deploy/kernels checks the rest (ranges of codes) with messages for people. It takes NumPy
// arrays, not torch tensors, so that the extension does not depend on the version of torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "dispatch.h"
#include "packing.h"
#include "training.h"

namespace py = pybind11;

namespace {

// Increase it whenever a signature or its meaning changes. mrem_deploy/kernels/backends.py expects the same
// number, so that an extension left over from an older checkout is not used.
constexpr int kInterface = 3;

using Codes = py::array_t<std::int8_t, py::array::c_style>;
using Bytes = py::array_t<std::uint8_t, py::array::c_style>;

// A sequence of texts and numbers is put together only if it is needed: most calls are right.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream message;
    (message << ... << parts);
    throw py::value_error(message.str());
}

void require_packable(int bits) {
    require(mrem::is_packable(bits), "bits must be 2, 3, 4 or 8, but is ", bits);
}

Bytes pack(const Codes& codes, int bits) {
    require_packable(bits);
    const auto count = static_cast<std::size_t>(codes.size());
    Bytes packed(static_cast<py::ssize_t>(mrem::packed_size(count, bits)));
    const std::int8_t* from = codes.data();
    std::uint8_t* to = packed.mutable_data();
    {
        py::gil_scoped_release without_gil;
        mrem::pack(from, count, bits, to);
    }
    return packed;
}

Codes unpack(const Bytes& packed, int bits, py::ssize_t count) {
    require_packable(bits);
    require(count >= 0, "count must not be negative, but is ", count);
    const auto needed = mrem::packed_size(static_cast<std::size_t>(count), bits);
    require(static_cast<std::size_t>(packed.size()) == needed, "expected ", needed,
            " packed bytes, but there are ", packed.size());
    Codes codes(count);
    const std::uint8_t* from = packed.data();
    std::int8_t* to = codes.mutable_data();
    {
        py::gil_scoped_release without_gil;
        mrem::unpack(from, static_cast<std::size_t>(count), bits, to);
    }
    return codes;
}

// -- training ----------------------------------------------------------------------------------------------

using Floats = py::array_t<float>;                     // any strides
using Plain = py::array_t<float, py::array::c_style>;  // contiguous; noconvert() refuses others
constexpr py::ssize_t kFloat = sizeof(float);

constexpr int kMostThreads = 1024;  // MOST_THREADS in ops.py
constexpr int kMostIterations = 1000;

std::size_t size_of(const py::array& array) { return static_cast<std::size_t>(array.size()); }

void require_range(const char* name, int value, int least, int most) {
    require(value >= least && value <= most, name, " must be ", least, " to ", most, ", but is ", value);
}

void require_grid(int low, int high) {
    require(low <= high, "low must not exceed high, but they are ", low, " and ", high);
}

// The bytes that an array's elements span, from the first to behind the last.
struct Span {
    std::uintptr_t begin, end;
};

Span span_of(const py::array& array) {
    const auto data = reinterpret_cast<std::uintptr_t>(array.data());
    if (array.size() == 0) return {data, data};
    Span span{data, data + static_cast<std::uintptr_t>(array.itemsize())};
    for (py::ssize_t i = 0; i < array.ndim(); ++i) {
        const py::ssize_t reach = (array.shape(i) - 1) * array.strides(i);
        (reach < 0 ? span.begin : span.end) += static_cast<std::uintptr_t>(reach);  // wraps, as it should
    }
    return span;
}

// An argument by its name in messages; `array` may be null: not given.
struct Named {
    const char* name;
    const py::array* array;
};

void require_aligned(const Named& argument) {
    const auto address = reinterpret_cast<std::uintptr_t>(argument.array->data());
    require(address % alignof(float) == 0, argument.name, " must be aligned to ", alignof(float),
            " bytes, but its address is ", address % alignof(float), " past that");
}

// What every call needs: aligned floats, outputs that may be written, and no output over another array. An
// output may be exactly `same`, element by element.
void require_memory(std::initializer_list<Named> inputs, std::initializer_list<Named> outputs,
                    const py::array* same = nullptr) {
    for (const Named& input : inputs) {
        if (input.array != nullptr) require_aligned(input);
    }
    const Named* others = outputs.begin();
    for (const Named& output : outputs) {
        require_aligned(output);
        require(output.array->writeable(), output.name, " must be writable, but is read-only");
        const auto require_apart = [&](const Named& other) {
            const Span one = span_of(*output.array), two = span_of(*other.array);
            const bool in_place = other.array == same && one.begin == two.begin && one.end == two.end;
            require(in_place || one.end <= two.begin || two.end <= one.begin, output.name,
                    " must not overlap ", other.name, ", but shares memory with it");
        };
        for (const Named& input : inputs) {
            if (input.array != nullptr) require_apart(input);
        }
        for (const Named* other = others; other != &output; ++other) require_apart(*other);
    }
}

const py::array* given(const std::optional<Plain>& array) { return array ? &*array : nullptr; }

void require_size(const char* name, const py::array& array, std::size_t expected) {
    require(size_of(array) == expected, name, " must have ", expected, " elements, but has ", array.size());
}

// A view for training.h. Dimensions are merged where memory allows, so that any contiguous array fits.
mrem::View view_of(const Floats& x) {
    require(x.size() > 0, "an empty array has nothing to quantize");
    mrem::View view{x.data(), {1, 1, 1}, {0, 0, 0}, 1};
    py::ssize_t last = x.ndim() - 1;
    while (last >= 0 && x.shape(last) == 1) --last;
    if (last < 0) return view;
    if (x.strides(last) == kFloat) {
        view.columns = static_cast<std::size_t>(x.shape(last));
        --last;
    } else {  // rows of one element, apart from each other
        require(last < x.ndim() - 1, "the last dimension must be contiguous");
    }
    std::size_t slot = view.sizes.size();
    for (py::ssize_t i = last; i >= 0; --i) {
        if (x.shape(i) == 1) continue;
        require(x.strides(i) % kFloat == 0, "strides must be whole floats");
        const auto size = static_cast<std::size_t>(x.shape(i));
        const std::ptrdiff_t stride = x.strides(i) / kFloat;
        if (slot < view.sizes.size() &&
            stride == view.strides[slot] * static_cast<std::ptrdiff_t>(view.sizes[slot])) {
            view.sizes[slot] *= size;  // one longer dimension instead of two
            continue;
        }
        require(slot > 0, "an array may have at most three strided dimensions and a contiguous one");
        --slot;
        view.sizes[slot] = size;
        view.strides[slot] = stride;
    }
    return view;
}

// One scale, or one for each row of a contiguous array.
mrem::Scales scales_of(const Plain& scales, const mrem::View& x, const Floats& array) {
    const std::size_t count = size_of(scales);
    if (count != 1) {
        require(array.ndim() >= 1, "an array without dimensions has one scale, but there are ", count);
        require(x.contiguous(), "one scale for each row needs a contiguous array");
        const auto columns = static_cast<std::size_t>(array.shape(array.ndim() - 1));
        const std::size_t rows = x.size() / columns;
        require(count == rows, "expected one scale, or one for each of ", rows, " rows, but there are ",
                count);
    }
    return {scales.data(), count};
}

// The view for scales per row: a row is the last dimension, even if its size is 1.
mrem::View rows_of(const Floats& array, const mrem::View& x, std::size_t scales) {
    if (scales == 1) return x;
    const auto columns = static_cast<std::size_t>(array.shape(array.ndim() - 1));
    const auto stride = static_cast<std::ptrdiff_t>(columns);
    return {x.data, {1, 1, x.size() / columns}, {0, 0, stride}, columns};
}

void quantize(const Floats& x, const Plain& scale, int low, int high, bool dequantize, Plain out,
              int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_grid(low, high);
    require_memory({{"x", &x}, {"scale", &scale}}, {{"out", &out}});
    const mrem::View view = view_of(x);
    const mrem::Scales scales = scales_of(scale, view, x);
    require_size("out", out, view.size());
    float* to = out.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    const mrem::View rows = rows_of(x, view, scales.count);
    py::gil_scoped_release without_gil;
    mrem::quantize(kernels, rows, scales, {static_cast<float>(low), static_cast<float>(high)}, dequantize, to,
                   threads);
}

void quantize_backward(const Plain& grad, const Floats& x, const Plain& scale, int low, int high,
                       Plain grad_x, Plain grad_scale, int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_grid(low, high);
    require_memory({{"grad", &grad}, {"x", &x}, {"scale", &scale}},
                   {{"grad_x", &grad_x}, {"grad_scale", &grad_scale}}, &grad);
    const mrem::View view = view_of(x);
    const mrem::Scales scales = scales_of(scale, view, x);
    require_size("grad", grad, view.size());
    require_size("grad_x", grad_x, view.size());
    require_size("grad_scale", grad_scale, scales.count);
    const float* from = grad.data();
    float *to = grad_x.mutable_data(), *to_scale = grad_scale.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    const mrem::View rows = rows_of(x, view, scales.count);
    py::gil_scoped_release without_gil;
    mrem::quantize_backward(kernels, from, rows, scales, {static_cast<float>(low), static_cast<float>(high)},
                            to, to_scale, threads);
}

void quantize_by_threshold(const Floats& weight, const Plain& threshold, int inner, int outer,
                           const std::optional<Plain>& factor, Plain out, int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_memory({{"weight", &weight}, {"threshold", &threshold}, {"factor", given(factor)}},
                   {{"out", &out}});
    const mrem::View view = view_of(weight);
    const mrem::Scales thresholds = scales_of(threshold, view, weight);
    require_size("out", out, view.size());
    if (factor) require_size("factor", *factor, thresholds.count);
    const float* factors = factor ? factor->data() : nullptr;
    float* to = out.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    const mrem::View rows = rows_of(weight, view, thresholds.count);
    py::gil_scoped_release without_gil;
    mrem::quantize_by_threshold(kernels, rows, thresholds,
                                {static_cast<float>(inner), static_cast<float>(outer)}, factors, to, threads);
}

void scale_product(Plain product, const Plain& scale, const std::optional<Plain>& bias, int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_memory({{"scale", &scale}, {"bias", given(bias)}}, {{"product", &product}});
    require(product.ndim() >= 1 && product.size() > 0, "the product must have a dimension and elements");
    const auto columns = static_cast<std::size_t>(product.shape(product.ndim() - 1));
    const bool one_scale = scale.size() == 1;
    if (!one_scale) require_size("scale", scale, columns);
    if (bias) require_size("bias", *bias, columns);
    const float *scales = scale.data(), *added = bias ? bias->data() : nullptr;
    const std::size_t rows = size_of(product) / columns;
    float* values = product.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    py::gil_scoped_release without_gil;
    mrem::scale_product(kernels, values, rows, columns, scales, one_scale, added, threads);
}

struct Matrix {
    std::size_t rows, columns;
};

Matrix matrix_of(const Plain& weight) {
    require(weight.ndim() >= 1 && weight.size() > 0, "the weight must have a dimension and elements");
    const auto columns = static_cast<std::size_t>(weight.shape(weight.ndim() - 1));
    return {size_of(weight) / columns, columns};
}

// twn or midrise, which have the same signature
template <auto Op>
void threshold_and_scale(const Plain& weight, bool per_row, Plain threshold, Plain scale, int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_memory({{"weight", &weight}}, {{"threshold", &threshold}, {"scale", &scale}});
    const Matrix shape = matrix_of(weight);
    const std::size_t count = per_row ? shape.rows : 1;
    require_size("threshold", threshold, count);
    require_size("scale", scale, count);
    const float* from = weight.data();
    float *delta = threshold.mutable_data(), *alpha = scale.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    py::gil_scoped_release without_gil;
    Op(kernels, from, shape.rows, shape.columns, per_row, delta, alpha, threads);
}

void laq(const Plain& weight, const Plain& start, const std::optional<Plain>& diagonal, int low, int high,
         int iterations, bool per_row, Plain scale, int threads) {
    require_range("threads", threads, 1, kMostThreads);
    require_range("iterations", iterations, 0, kMostIterations);
    require_grid(low, high);
    require_memory({{"weight", &weight}, {"start", &start}, {"diagonal", given(diagonal)}},
                   {{"scale", &scale}});
    const Matrix shape = matrix_of(weight);
    const std::size_t count = per_row ? shape.rows : 1;
    require_size("start", start, count);
    require_size("scale", scale, count);
    if (diagonal) require_size("diagonal", *diagonal, size_of(weight));
    const float *from = weight.data(), *first = start.data();
    const float* curvature = diagonal ? diagonal->data() : nullptr;
    float* alpha = scale.mutable_data();
    const mrem::Kernels& kernels = mrem::active_kernels();
    py::gil_scoped_release without_gil;
    mrem::laq(kernels, from, first, curvature, shape.rows, shape.columns,
              {static_cast<float>(low), static_cast<float>(high)}, iterations, per_row, alpha, threads);
}

// The name of every compiled target, best first -> whether it can run here.
py::dict targets() {
    py::dict listed;
    for (const mrem::Target& target : mrem::targets()) {
        listed[target.kernels->name] = target.supported(mrem::cpu_features());
    }
    return listed;
}

py::dict cpu_features() {
    const mrem::CpuFeatures& found = mrem::cpu_features();
    py::dict told;
    told["cpuid_avx2"] = found.cpuid_avx2;
    told["cpuid_avx512f"] = found.cpuid_avx512f;
    told["os_avx"] = found.os_avx;
    told["os_avx512"] = found.os_avx512;
    return told;
}

bool has_threads() {
#ifdef _OPENMP
    return true;
#else
    return false;
#endif
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "C++ kernels; call them through mrem_deploy.kernels.";
    m.attr("INTERFACE") = kInterface;
    m.def("pack", &pack, py::arg("codes").noconvert(), py::arg("bits"));
    m.def("unpack", &unpack, py::arg("packed").noconvert(), py::arg("bits"), py::arg("count"));

    m.attr("THREADS") = has_threads();
    m.def("targets", &targets);
    m.def("cpu_features", &cpu_features);
    m.def("active_target", [] { return mrem::active_kernels().name; });
    m.def("use_target", &mrem::use_target, py::arg("name"));
    m.def("quantize", &quantize, py::arg("x").noconvert(), py::arg("scale").noconvert(), py::arg("low"),
          py::arg("high"), py::arg("dequantize"), py::arg("out").noconvert(), py::arg("threads"));
    m.def("quantize_backward", &quantize_backward, py::arg("grad").noconvert(), py::arg("x").noconvert(),
          py::arg("scale").noconvert(), py::arg("low"), py::arg("high"), py::arg("grad_x").noconvert(),
          py::arg("grad_scale").noconvert(), py::arg("threads"));
    m.def("quantize_by_threshold", &quantize_by_threshold, py::arg("weight").noconvert(),
          py::arg("threshold").noconvert(), py::arg("inner"), py::arg("outer"), py::arg("factor").noconvert(),
          py::arg("out").noconvert(), py::arg("threads"));
    m.def("scale_product", &scale_product, py::arg("product").noconvert(), py::arg("scale").noconvert(),
          py::arg("bias").noconvert(), py::arg("threads"));
    m.def("twn", &threshold_and_scale<mrem::twn>, py::arg("weight").noconvert(), py::arg("per_row"),
          py::arg("threshold").noconvert(), py::arg("scale").noconvert(), py::arg("threads"));
    m.def("midrise", &threshold_and_scale<mrem::midrise>, py::arg("weight").noconvert(), py::arg("per_row"),
          py::arg("threshold").noconvert(), py::arg("scale").noconvert(), py::arg("threads"));
    m.def("laq", &laq, py::arg("weight").noconvert(), py::arg("start").noconvert(),
          py::arg("diagonal").noconvert(), py::arg("low"), py::arg("high"), py::arg("iterations"),
          py::arg("per_row"), py::arg("scale").noconvert(), py::arg("threads"));
}
