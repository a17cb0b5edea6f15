// Writes the logits that llama.cpp gives for each token of a text, as 32-bit floats, and prints the tokens.
//
//     llama_logits MODEL.gguf ROWS OUT < text        (built like ../tokenizer/llama_ids.cpp)
//
// The text's first ROWS tokens run in one batch, with llama.cpp's default settings on the CPU.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: llama_logits MODEL.gguf ROWS OUT < text\n");
        return 2;
    }
    const int rows = atoi(argv[2]);
    std::string text;
    for (int c; (c = getchar()) != EOF;) {
        text.push_back((char) c);
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 16);
    const int count = llama_tokenize(vocab, text.data(), (int) text.size(), tokens.data(), (int) tokens.size(), false, false);
    if (count < rows) {
        fprintf(stderr, "the text has only %d tokens\n", count);
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = rows;
    params.n_batch = rows;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        return 1;
    }
    llama_batch batch = llama_batch_init(rows, 0, 1);
    for (int i = 0; i < rows; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = rows;
    if (llama_decode(context, batch) != 0) {
        return 1;
    }
    FILE * out = fopen(argv[3], "wb");
    for (int i = 0; i < rows; i++) {
        printf("%s%d", i ? "," : "[", tokens[i]);
        fwrite(llama_get_logits_ith(context, i), sizeof(float), llama_vocab_n_tokens(vocab), out);
    }
    printf("]\n");
    fclose(out);
    return 0;
}
