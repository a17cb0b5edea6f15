// Writes the logits that llama.cpp gives for tokens, without flash attention, and with keys and values in single or in half precision.
//
//     judge MODEL CONTEXT single|half OUTPUT TOKEN...
//
// The output has a row of 32-bit floats for each token.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc < 6) {
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) {
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = atoi(argv[2]);
    params.type_k = params.type_v = strcmp(argv[3], "half") == 0 ? GGML_TYPE_F16 : GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        return 1;
    }
    const int count = argc - 5;
    llama_batch batch = llama_batch_init(count, 0, 1);
    for (int i = 0; i < count; i++) {
        batch.token[i] = atoi(argv[5 + i]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = count;
    if (llama_decode(context, batch) != 0) {
        return 1;
    }
    FILE * out = fopen(argv[4], "wb");
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < count; i++) {
        fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, out);
    }
    fclose(out);
    return 0;
}
