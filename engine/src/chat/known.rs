//! Chat formats that a vocabulary gives away. Used only for models whose file has no template but whose tokens include
//! a format's own markers: those were put there to be trained with.

use crate::tokenizer::Tokenizer;

/// A format: its name, the markers that must all be control tokens, and a template that writes it.
struct Format {
    name: &'static str,
    markers: &'static [&'static str],
    template: &'static str,
}

const FORMATS: &[Format] = &[
    Format {
        name: "gemma",
        markers: &["<start_of_turn>", "<end_of_turn>"],
        // Gemma knows no system role: its text goes in front of the first question.
        template: concat!(
            "{{- bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}",
            "{% if message.role in ['system', 'developer'] %}{% set ns.system = ns.system + message.content | trim + '\n\n' %}{% else %}",
            "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}",
            "{% if message.role != 'assistant' %}{{- ns.system }}{% set ns.system = '' %}{% endif %}",
            "{{- (message.content or '') | trim }}{{- '<end_of_turn>\n' }}{% endif %}{% endfor %}",
            "{% if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}",
        ),
    },
    Format {
        name: "llama-3",
        markers: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        template: concat!(
            "{{- bos_token }}{% for message in messages %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}",
            "{{- (message.content or '') | trim }}{{- '<|eot_id|>' }}{% endfor %}",
            "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ),
    },
    Format {
        name: "chatml",
        markers: &["<|im_start|>", "<|im_end|>"],
        template: concat!(
            "{% for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{{- message.content or '' }}",
            "{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
        ),
    },
];

/// The name and template of the format that the vocabulary shows.
pub(crate) fn format_of(tokenizer: &Tokenizer) -> Option<(&'static str, &'static str)> {
    let has = |marker: &&str| tokenizer.token_named(marker).is_some_and(|token| tokenizer.is_control(token));
    FORMATS.iter().find(|format| format.markers.iter().all(has)).map(|format| (format.name, format.template))
}
