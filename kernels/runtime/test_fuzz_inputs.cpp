// The inputs that the fuzzer has learned, and some at random, through its target without libFuzzer: any
// compiler can build this, so the ordinary tests and the sanitizers go where the fuzzer has been.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** arguments) {
    std::ifstream stored(count == 2 ? arguments[1] : "");
    std::string line;
    std::size_t learned = 0;
    while (std::getline(stored, line)) {  // two hexadecimal digits a byte
        std::vector<std::uint8_t> input;
        for (std::size_t i = 0; i + 1 < line.size(); i += 2) {
            input.push_back(static_cast<std::uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
        }
        LLVMFuzzerTestOneInput(input.data(), input.size());
        ++learned;
    }
    if (learned == 0) {
        std::fputs("FAILED: there are no inputs in the file\n", stderr);
        return 1;
    }
    constexpr std::size_t kRandom = 500;
    std::mt19937 engine(1);
    for (std::size_t i = 0; i < kRandom; ++i) {
        std::vector<std::uint8_t> input(engine() % 64);
        for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(engine());
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("fuzz inputs: ok, %zu learned and %zu random\n", learned, kRandom);
    return 0;
}
