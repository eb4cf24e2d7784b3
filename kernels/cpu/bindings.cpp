// The only file that knows Python. It checks what memory safety needs and releases the GIL around the
// kernels; meaning (ranges of codes, messages for people) is checked in mrem_deploy/kernels. NumPy arrays and
// not torch tensors cross this border, so that the extension does not depend on the version of torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "packing.h"

namespace py = pybind11;

namespace {

// Grows whenever a signature or meaning here changes; mrem_deploy/kernels/backends.py expects the same
// number, so that an extension left over from an older checkout is not used.
constexpr int kInterface = 1;

using Codes = py::array_t<std::int8_t, py::array::c_style>;
using Bytes = py::array_t<std::uint8_t, py::array::c_style>;

void require_packable(int bits) {
    if (!mrem::is_packable(bits)) {
        throw py::value_error("bits must be 2, 3, 4 or 8, but is " + std::to_string(bits));
    }
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
    if (count < 0) throw py::value_error("count must not be negative, but is " + std::to_string(count));
    const auto needed = mrem::packed_size(static_cast<std::size_t>(count), bits);
    if (static_cast<std::size_t>(packed.size()) != needed) {
        throw py::value_error("expected " + std::to_string(needed) + " packed bytes, but there are " +
                              std::to_string(packed.size()));
    }
    Codes codes(count);
    const std::uint8_t* from = packed.data();
    std::int8_t* to = codes.mutable_data();
    {
        py::gil_scoped_release without_gil;
        mrem::unpack(from, static_cast<std::size_t>(count), bits, to);
    }
    return codes;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "C++ kernels; call them through mrem_deploy.kernels.";
    m.attr("INTERFACE") = kInterface;
    m.def("pack", &pack, py::arg("codes").noconvert(), py::arg("bits"));
    m.def("unpack", &unpack, py::arg("packed").noconvert(), py::arg("bits"), py::arg("count"));
}
