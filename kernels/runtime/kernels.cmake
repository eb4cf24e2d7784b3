# The kernels of the CPU runtime and the blocks built on them, for every instruction set that the compiler knows.
# Included by CMakeLists.txt, which defines mrem_runtime_flags.
set(MREM_RUNTIME_HERE ${CMAKE_CURRENT_LIST_DIR})
add_library(mrem_runtime_kernels STATIC
  ${MREM_RUNTIME_HERE}/../cpu/cpu_features.cpp
  ${MREM_RUNTIME_HERE}/amx_permission.cpp ${MREM_RUNTIME_HERE}/attention.cpp ${MREM_RUNTIME_HERE}/attention_block.cpp ${MREM_RUNTIME_HERE}/blocks.cpp
  ${MREM_RUNTIME_HERE}/feed_forward_block.cpp ${MREM_RUNTIME_HERE}/gemm.cpp ${MREM_RUNTIME_HERE}/proof.cpp
  ${MREM_RUNTIME_HERE}/scratch.cpp ${MREM_RUNTIME_HERE}/targets.cpp ${MREM_RUNTIME_HERE}/weights.cpp
  ${MREM_RUNTIME_HERE}/gemm_scalar.cpp ${MREM_RUNTIME_HERE}/float_scalar.cpp)
target_include_directories(mrem_runtime_kernels PUBLIC ${MREM_RUNTIME_HERE} ${MREM_RUNTIME_HERE}/../cpu)
target_link_libraries(mrem_runtime_kernels PUBLIC mrem_runtime_flags)

# mrem_runtime_target(NAME FLAGS... FILES files...): files that alone may use these instructions, and the
# definition MREM_RUNTIME_HAVE_NAME. targets.cpp asks the processor before it calls one.
include(CheckCXXCompilerFlag)
function(mrem_runtime_target name)
  cmake_parse_arguments(target "" "" "FLAGS;FILES" ${ARGN})
  string(REPLACE ";" " " flags "${target_FLAGS}")
  check_cxx_compiler_flag("${flags}" MREM_COMPILER_HAS_RUNTIME_${name})
  if(NOT MREM_COMPILER_HAS_RUNTIME_${name})
    return()
  endif()
  foreach(file ${target_FILES})
    target_sources(mrem_runtime_kernels PRIVATE ${MREM_RUNTIME_HERE}/${file})
    set_source_files_properties(${MREM_RUNTIME_HERE}/${file} PROPERTIES COMPILE_OPTIONS "${target_FLAGS}")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # A false alarm in GCC's own header (GCC bug 105593): its "undefined" register is meant to be just that.
      set_property(SOURCE ${MREM_RUNTIME_HERE}/${file} APPEND PROPERTY COMPILE_OPTIONS -Wno-uninitialized
                                                                                      -Wno-maybe-uninitialized)
    endif()
  endforeach()
  target_compile_definitions(mrem_runtime_kernels PUBLIC MREM_RUNTIME_HAVE_${name})
endfunction()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8 AND NOT MSVC
   AND NOT CMAKE_OSX_ARCHITECTURES MATCHES "arm64")
  set(avx2 -mavx2 -mfma)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  mrem_runtime_target(FLOATS_AVX2 FLAGS ${avx2} FILES float_avx2.cpp)
  mrem_runtime_target(FLOATS_AVX512 FLAGS ${avx512} FILES float_avx512.cpp)
  mrem_runtime_target(AVX2 FLAGS ${avx2} FILES gemm_avx2.cpp)
  mrem_runtime_target(AVXVNNI FLAGS ${avx2} -mavxvnni FILES gemm_avxvnni.cpp)
  mrem_runtime_target(AVX512VNNI FLAGS ${avx512} -mavx512vnni FILES gemm_avx512vnni.cpp)
  set(amx_flags ${avx512} -mavx512vnni -mamx-tile -mamx-int8)
  mrem_runtime_target(AMX FLAGS ${amx_flags} FILES gemm_amx.cpp)
endif()

# For the tests: the code for AMX with plain arrays in place of tiles.
function(mrem_runtime_emulated_amx)
  add_library(mrem_runtime_emulated INTERFACE)
  if(amx_flags)
    add_library(mrem_runtime_amx_emulated OBJECT ${MREM_RUNTIME_HERE}/gemm_amx_emulated.cpp)
    target_link_libraries(mrem_runtime_amx_emulated PRIVATE mrem_runtime_kernels)
    target_compile_options(mrem_runtime_amx_emulated PRIVATE ${amx_flags}
                           $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>)
    target_sources(mrem_runtime_emulated INTERFACE $<TARGET_OBJECTS:mrem_runtime_amx_emulated>)
  endif()
endfunction()
