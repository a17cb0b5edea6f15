// Prints the ids that llama.cpp gives for strings. Reads from standard input, for each string: a line with its length
// in bytes, its bytes, a newline. Prints two lines for each: with control tokens in the text meant as such, and without.
//
//     c++ -O1 -std=c++17 -I LLAMA/include -I LLAMA/ggml/include llama_ids.cpp -o llama_ids LIBRARIES
//
// where LLAMA is llama.cpp's source and LIBRARIES are its libllama and libggml*.
#include <cstdio>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: llama_ids MODEL.gguf < strings\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    size_t length = 0;
    while (scanf("%zu", &length) == 1) {
        getchar();
        std::string text(length, '\0');
        if (fread(text.data(), 1, length, stdin) != length) {
            return 1;
        }
        for (bool special : {true, false}) {
            std::vector<llama_token> ids(length + 16);
            int count = llama_tokenize(vocab, text.data(), (int) length, ids.data(), (int) ids.size(), false, special);
            if (count < 0) {
                return 1;
            }
            for (int i = 0; i < count; i++) {
                printf(i ? " %d" : "%d", ids[i]);
            }
            printf("\n");
        }
    }
    return 0;
}
