use serde_json::json;

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, "<s>".to_owned(), "</s>".to_owned()).unwrap()
}

fn render(source: &str, options: &ChatOptions) -> Result<String, ChatError> {
    let messages = [Message::new("system", "Be brief."), Message::new("user", "Hi <b>&'\" é")];
    template(source).render(&messages, options)
}

fn plain(source: &str) -> String {
    render(source, &ChatOptions::default()).unwrap()
}

#[test]
fn messages_and_tokens_are_seen() {
    let source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'] }}]{% endfor %}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}";
    assert_eq!(plain(source), "<s>[system|Be brief.][user|Hi <b>&'\" é]</s>>", "nothing is escaped");
    let without = ChatOptions { add_generation_prompt: false, ..Default::default() };
    assert!(render(source, &without).unwrap().ends_with("</s>"));
}

#[test]
fn blocks_leave_no_lines_behind() {
    let source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n";
    assert_eq!(plain(source), "system\nuser\n");
}

#[test]
fn pythons_methods_and_idioms_work() {
    assert_eq!(plain("{{ ' a '.strip() + 'b,c'.split(',')[1] + 'x'.upper() }}"), "acX");
    assert_eq!(plain("{{ messages[0].role.startswith('sys') }}"), "True");
    assert_eq!(plain("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"), "2");
    assert_eq!(plain("{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"), "rolecontent");
    assert_eq!(plain("{{ messages[1:] | length }}{{ messages[-1].role }}"), "1user");
    assert_eq!(plain("{{ messages[0].get('absent', 'default') }}{{ messages[0].absent }}"), "default");
    assert_eq!(plain("{% if tools is not none and tools %}x{% endif %}{{ messages[0].content is string }}"), "True");
    assert_eq!(plain("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}"), "<a>");
    assert_eq!(plain("{{- 'a' ~ 1 }}{{ ['a','b'] | join('+') }}{{ 'x' if false }}"), "a1a+b");
}

#[test]
fn loops_can_be_left() {
    assert_eq!(
        plain("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"),
        "02"
    );
}

#[test]
fn a_template_that_loops_without_end_is_stopped() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    let error = render(nested, &ChatOptions::default()).unwrap_err();
    assert!(matches!(&error, ChatError::TooMuch(text) if text.contains("fuel")), "{error}");
}

#[test]
fn tools_are_written_as_python_does() {
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "a < b & 'c'", "parameters": {}}}]);
    let options = ChatOptions { tools: Some(tools), ..Default::default() };
    assert_eq!(
        render("{% for t in tools %}{{ t | tojson }}{% endfor %}", &options).unwrap(),
        r#"{"type": "function", "function": {"name": "f", "description": "a < b & 'c'", "parameters": {}}}"#
    );
    assert!(render("{{ tools | tojson(indent=4) }}", &options).unwrap().starts_with("[\n    {\n        \"type\""));
    assert!(render("{{ tools | tojson(ensure_ascii=False) }}", &options).unwrap().starts_with("[{"));
}

#[test]
fn values_print_as_python_prints_them() {
    assert_eq!(plain("{{ [1, 'a', none, true, 2.0] }}"), "[1, 'a', None, True, 2.0]");
    assert_eq!(plain("{{ {'a': [], 'b': {'c': \"it's\"}} }}"), "{'a': [], 'b': {'c': \"it's\"}}");
    assert_eq!(plain("{{ [1, 'a'] | string + '!' }}"), "[1, 'a']!");
    assert_eq!(plain("{{ none }}{{ false }}{{ absent }}"), "NoneFalse");
    assert_eq!(plain("{{ none is iterable }}{{ [] is iterable }}{{ 'a' is iterable }}{{ absent is iterable }}"), "FalseTrueTrueTrue");
    assert_eq!(plain("{{ '<a>' | e }}"), "&lt;a&gt;");
    assert_eq!(plain("{{ 'a\n\nb\n' | indent(2, first=true) }}|"), "  a\n\n  b\n|");
    assert_eq!(plain("{{ 'a\nb' | indent }}"), "a\n    b");
    assert_eq!(plain("{% generation %}a{% endgeneration %}"), "a");
}

#[test]
fn a_template_may_refuse() {
    let refused = render("{{ raise_exception('Roles must alternate') }}", &ChatOptions::default());
    assert_eq!(refused, Err(ChatError::Refused("Roles must alternate".to_owned())));
    let source = "{% macro check() %}{{ raise_exception('in a macro') }}{% endmacro %}{{ check() }}";
    assert!(matches!(render(source, &ChatOptions::default()), Err(ChatError::Refused(text)) if text == "in a macro"));
}

#[test]
fn dates_are_given_not_read() {
    let source = "{% if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% else %}no clock{% endif %}";
    assert_eq!(plain(source), "no clock");
    let dated = ChatOptions { unix_seconds: Some(1_709_210_096), ..Default::default() };
    assert_eq!(render(source, &dated).unwrap(), "29 February 2024");
}

#[test]
fn further_variables_cannot_replace_the_conversation() {
    let extra = json!({"enable_thinking": false, "messages": []}).as_object().unwrap().clone();
    let options = ChatOptions { extra, ..Default::default() };
    assert_eq!(render("{{ enable_thinking }}{{ messages | length }}", &options).unwrap(), "False2");
}

#[test]
fn faults_name_the_line() {
    let error = ChatTemplate::from_source("a\n{% for %}", String::new(), String::new()).unwrap_err();
    assert!(matches!(&error, ChatError::Template(text) if text.contains("line 2")), "{error}");
    let error = render("\n\n{{ nothing.at.all }}", &ChatOptions::default()).unwrap_err();
    assert!(matches!(&error, ChatError::Render(text) if text.contains("line 3")), "{error}");
    let endless = render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &ChatOptions::default());
    assert!(matches!(endless, Err(ChatError::Render(_))));
}

#[test]
fn arguments_come_as_the_template_wants_them() {
    let call: Message = serde_json::from_value(json!({
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]
    }))
    .unwrap();
    let run = |source: &str| template(source).render(std::slice::from_ref(&call), &ChatOptions::default()).unwrap();
    assert_eq!(run("{{ messages[0].tool_calls[0].function.arguments | tojson }}"), r#"{"x": 1}"#);
    assert_eq!(run("{{ 'args: ' + messages[0].tool_calls[0].function.arguments }}"), r#"args: {"x": 1}"#);
    assert_eq!(run("{% if messages[0].content is none %}none{% endif %}"), "none");
}
