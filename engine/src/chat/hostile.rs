//! Templates that want to take a machine's memory or time. Each must end, with the error that says so; that they do not take much until
//! then is what the limits count.

use proptest::prelude::*;

use super::*;

/// What becomes of a template, with a conversation of one short message.
fn outcome(source: &str) -> Result<String, ChatError> {
    let template = ChatTemplate::from_source(source, "<s>".to_owned(), "</s>".to_owned())?;
    template.render(&[Message::new("user", "Hi")], &ChatOptions { unix_seconds: Some(1_709_210_096), ..Default::default() })
}

/// What is wrong if a template is not stopped.
fn not_stopped(source: &str) -> Option<String> {
    let outcome = outcome(source);
    let stopped = matches!(outcome, Err(ChatError::TooMuch(_)));
    (!stopped).then(|| format!("{source}: {:?}", outcome.map(|text| text.len())))
}

fn assert_stopped(source: &str) {
    assert_eq!(not_stopped(source), None);
}

/// Each of `sources` after [`BIG`].
fn assert_all_stopped(sources: &[&str]) {
    let wrong: Vec<String> = sources.iter().filter_map(|source| not_stopped(&format!("{BIG}{source}"))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A text of 100 kB, which all of the following begin with.
const BIG: &str = "{% set n = 100000 %}{% set a = 'a' * n %}";

#[test]
fn texts_do_not_grow_without_bound() {
    assert_all_stopped(&[
        "{% set b = a.replace('a', a) %}{{ b.replace('a', a) | length }}",
        "{{ a | replace('a', a) | length }}",
        "{{ a | replace('', a) | length }}",
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a | length }}",
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a | length }}",
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
        "{% set ns = namespace(a='aa') %}{% for i in range(99) %}{% set ns.a = ns.a.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = (ns.a ~ ',' ~ ns.a) | string %}{% endfor %}",
        "{{ (a * n) | length }}",
        "{{ ('ab' * 1000000000000) | length }}",
        "{% set m = 1000000000000 %}{{ ('' ~ 'ab' * m) | length }}",
        "{{ ([a] * n) ~ '' }}",
        "{{ a.join([1] * 100000) | length }}",
        "{{ ([1] * n) | join(a) | length }}",
        "{{ ([a] * n) | join('') | length }}",
        "{{ ([a] * n) | join(attribute=0) | length }}",
        "{{ '{:1000000000}'.format(3) }}",
        "{{ '{:.1000000000}'.format(3.5) }}",
        "{{ '{:>1000000000}'.format('a') }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ '%*d' | format(1000000000, 3) }}",
        "{{ ('{0}' * n).format(a) | length }}",
        "{{ ('%s' * n) | format(a) | length }}",
        "{{ ('{0[0]}' * n).format([a]) | length }}",
        "{{ ('a\n' * n * 2) | indent(1000) | length }}",
        "{{ ('\n' * n * 2) | indent(a[:1000], blank=true) | length }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ ([[a] * 1000] * 1000) | string | length }}",
        "{{ ([[a] * 1000] * 1000) | tojson | length }}",
        "{{ ([[a] * 1000] * 1000) ~ '' }}",
        "{{ [[a] * 1000] * 1000 }}",
        "{{ ([[1] * n] * 1000) | tojson(indent=64) | length }}",
        "{{ ('<' * n * 300) | e | length }}",
        "{{ ('\x01' * n * 300) | tojson | length }}",
        "{% for i in range(100000) %}{{ a }}{% endfor %}",
        "{% macro f() %}{{ a }}{% endmacro %}{% for i in range(100000) %}{{ f() }}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [a.upper()] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [a.strip('b')] %}{% endfor %}",
        "{% for i in range(100000) %}{% set x = a | title %}{% endfor %}",
        "{% filter upper %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endfilter %}",
        "{% block b %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endblock %}",
        "{% macro f() %}{% for i in range(100000) %}{{ caller() }}{% endfor %}{% endmacro %}{% call f() %}{{ a }}{% endcall %}",
        "{% for i in range(100) %}{{ a }}{% endfor %}",
        "{{ strftime_now(a) }}",
        "{{ 'ab'.replace('a', a).replace('a', a).replace('a', a) | length }}",
    ]);
    // What is not a value but stands in the template.
    let long = "x".repeat(100_000);
    assert_stopped(&format!("{{% for i in range(100000) %}}{long}{{% endfor %}}"));
    assert_stopped(&format!("{{% for i in range(100000) %}}{{% set y %}}{long}{{% endset %}}{{% endfor %}}"));
}

#[test]
fn lists_do_not_grow_without_bound() {
    assert_all_stopped(&[
        "{{ ([1] * 10000000000) | length }}",
        "{% set m = 10000000000 %}{{ ([1] * m) | length }}",
        "{% set m = 10000000000 %}{% for x in [1] * m %}{% endfor %}",
        "{% set m = 10000000000 %}{{ 2 in [1] * m }}",
        "{% set m = 10000000000 %}{{ [] * m }}",
        "{{ 2 in [1] * 10000000000 }}",
        "{{ ([1] * 10000000000) == ([1] * 10000000000) }}",
        "{{ ([1] * 1000 * 1000 * 1000 * 1000) ~ '' }}",
        "{{ range(10000000000) | list | length }}",
        "{{ range(-9223372036854775807, 9223372036854775807) }}",
        "{% set l = range(100000) | list %}{{ ((l + l) * 100) | length }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}",
        "{{ [1] | batch(1000000000, 0) | list | length }}",
        "{{ [1] | slice(1000000000) | list | length }}",
        "{{ (a * 400) | list | length }}",
        "{{ (a * 400).split('') | length }}",
        "{{ (a * 400) | split('a') | length }}",
        "{{ ('\n' * 40000000) | length }}",
        "{{ ('\n' * n * 400).splitlines() | length }}",
        "{{ ('\n' * n * 400) | lines | length }}",
        "{{ (a * 400) | reverse | map('upper') | list | length }}",
        "{{ (a * 400) | map('upper') | list | length }}",
        "{{ (a * 400) | sort | length }}",
        "{{ (a * 400) | select('string') | list | length }}",
        "{{ (a * 400)[::2] | length }}",
        "{% set x, y = a * 400 %}",
        "{% set l = [1] * n %}{% for i in range(10000) %}{% set x = l[1:] %}{% endfor %}",
        "{% set l = [1] * n %}{% for i in range(10000) %}{% set x = l | sort %}{% endfor %}",
        "{% set l = [1] * n %}{% for i in range(10000) %}{% set x = l | unique %}{% endfor %}",
        "{% set l = [1] * n %}{% for i in range(10000) %}{% set x = l | map('string') | list %}{% endfor %}",
        "{% set d = dict(a=[1] * n) %}{% for i in range(100000) %}{% set x = d | tojson %}{% endfor %}",
    ]);
}

#[test]
fn time_is_bounded() {
    assert_all_stopped(&[
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100) %}{% if 'b' in a %}{% endif %}{% endfor %}{% endfor %}",
        "{% set b = 'a' * n %}{% for i in range(100000) %}{% if a == b %}{% endif %}{% endfor %}",
        "{% set b = [a] * 99 %}{% set c = [a] * 99 %}{% for i in range(100000) %}{% if b == c %}{% endif %}{% endfor %}",
        "{% set b = [a] * 99 %}{% for i in range(100000) %}{% if 1 < b < 2 %}{% endif %}{% endfor %}",
        "{% set b = [1] * n %}{% for i in range(100000) %}{% if 2 in b %}{% endif %}{% endfor %}",
        "{% for i in range(100000) %}{{ a | length }}{% endfor %}",
        "{% for i in range(100000) %}{{ a[99999] }}{% endfor %}",
        "{% for i in range(100000) %}{{ {}[a] }}{% endfor %}",
        "{% for i in range(100000) %}{% set x = {a: 1} %}{% endfor %}",
        "{% for i in range(100000) %}{% set x = {}.get(a) %}{% endfor %}",
        "{% for i in range(100000) %}{{ a.find('b') }}{% endfor %}",
        "{% for i in range(100000) %}{{ a.count('b') }}{% endfor %}",
        "{% for i in range(100000) %}{{ a.startswith(a) }}{% endfor %}",
        "{% for i in range(100000) %}{{ a is lower }}{% endfor %}",
        "{% for i in range(100000) %}{{ a is startingwith(a) }}{% endfor %}",
        "{{ a.strip('a' * 1000) }}",
        "{% for i in range(100000) %}{% set x = a.strip('bcdefghijklmnopqrstuvwxyz') %}{% endfor %}",
        "{{ ([a] * 1000).count(a) }}{{ ([a] * n).count(a) }}",
        "{{ ([a] * n) | select('eq', a) | list | length }}",
        "{{ ([a] * n) | sort | length }}",
        "{% for i in range(100000) %}{% macro f() %}{% endmacro %}{% endfor %}",
        "{% macro g() %}{% macro h() %}{% endmacro %}{% endmacro %}{% for i in range(100000) %}{{ g() }}{% endfor %}",
        "{% for x in [1] recursive %}{% for i in range(100000) %}{% for j in range(10) %}{% set y = a is upper %}{% endfor %}{% endfor %}{% endfor %}",
    ]);
    // In Python this is 3; the library looks for it for ever.
    assert_eq!(outcome("{{ 'ab'.count('') }}"), Ok("3".to_owned()));
}

#[test]
fn nothing_contains_itself_and_nothing_is_deep() {
    for knot in [
        "{% set ns = namespace() %}{% set ns.a = ns %}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}",
        "{% set ns = namespace() %}{% set ns.a = {'x': [ns]} %}",
        "{% set ns = namespace() %}{% set x = namespace(a=ns) %}",
        "{% set ns = namespace() %}{% set x = dict(a=ns) %}",
        "{% set ns = namespace() %}{% for x in [1] %}{% set ns.a = loop %}{% endfor %}",
        "{% for x in [1] %}{% set y = [loop] %}{% endfor %}",
        "{% set ns = namespace() %}{% macro f() %}{% endmacro %}{% set ns.a = f %}",
        "{% set ns = namespace() %}{% set ns.a = range %}",
        "{% for x in [1] %}{{ loop.changed(loop) }}{% endfor %}",
    ] {
        let outcome = outcome(knot);
        assert!(matches!(outcome, Err(ChatError::Render(_) | ChatError::Template(_))), "{knot}: {outcome:?}");
    }
    for deep in [
        "{% set ns.a = [ns.a] %}",
        "{% set ns.a = {'x': ns.a} %}",
        "{% set ns.a = dict(x=ns.a) %}",
        "{% set ns.a = [ns.a] | batch(1) | list %}",
        "{% set ns.a = [1, ns.a] | slice(1) | list %}",
        "{% set ns.a = {'x': ns.a} | items | list %}",
        "{% set ns.a = {'x': ns.a}.items() %}",
        "{% set ns.a = {'x': ns.a} | dictsort %}",
        "{% set ns.a = [{'k': ns.a}] | groupby('k') %}",
        "{% set ns.a = [ns.a] | map('list') | map('batch', 1) | list %}",
    ] {
        assert_stopped(&format!("{{% set ns = namespace(a=[[1]]) %}}{{% for i in range(100000) %}}{deep}{{% endfor %}}"));
    }
    // Lists that hold a part of another hold it and not the other.
    let parts = "{% set ns = namespace(a=[1, 2]) %}{% for i in range(9999) %}{% set ns.a = ns.a[0:] %}{% endfor %}{{ ns.a }}";
    assert_eq!(outcome(parts), Ok("[1, 2]".to_owned()));
    let sums = "{% set ns = namespace(a=[]) %}{% for i in range(999) %}{% set ns.a = ns.a + [i] %}{% endfor %}{{ ns.a | length }}";
    assert_eq!(outcome(sums), Ok("999".to_owned()));
}

#[test]
fn templates_that_are_too_long_to_read_are_not_read() {
    // In a thread with little stack, as the threads of the product have.
    let read = |source: String| {
        let reader = std::thread::Builder::new().stack_size(1 << 20).spawn(move || outcome(&source).map(|text| text.len()));
        reader.unwrap().join().unwrap()
    };
    let stopped = |source: String| {
        let start: String = source.chars().take(30).collect();
        let outcome = read(source);
        assert!(matches!(outcome, Err(ChatError::TooMuch(_) | ChatError::Template(_))), "{start}: {outcome:?}");
    };
    let many = |part: &str, count: usize| part.repeat(count);
    stopped("x".repeat(300 << 10));
    for count in [2000, 50_000] {
        stopped(format!("{{{{ 1{} }}}}", many("+1", count)));
        stopped(format!("{{{{ messages{} }}}}", many("[0]", count)));
        stopped(format!("{{{{ a{} }}}}", many("|e", count)));
        stopped(format!("{{{{ a{} }}}}", many(".b", count)));
        stopped(format!("{{{{ {}1 }}}}", many("not ", count)));
        stopped(format!("{{{{ {}1 }}}}", many("-", count)));
        stopped(format!("{{{{ 1{} }}}}", many(" if 1 else 1", count)));
        stopped(format!("{{{{ {}1{} }}}}", many("(", count), many(")", count)));
        stopped(format!("{{{{ {}1{} }}}}", many("[", count), many("]", count)));
        stopped(format!("{{% if a %}}{}{{% endif %}}", many("{% elif a %}", count.min(20_000))));
        stopped(format!("{}{}", many("{% if a %}", count.min(10_000)), many("{% endif %}", count.min(10_000))));
    }
    // What is just short enough is read.
    for source in [
        format!("{{{{ 1{} }}}}", many("+1", 490)),
        format!("{{{{ a{} }}}}", many("~''", 490)),
        format!("{{{{ ''{} }}}}", many("|e", 490)),
        format!("{{{{ {}1{} }}}}", many("(", 70), many(")", 70)),
        format!("{{% if a %}}{}{{% endif %}}", many("{% elif a %}", 190)),
        format!("{}{}", many("{% if true %}", 70), many("{% endif %}", 70)),
    ] {
        let start: String = source.chars().take(30).collect();
        let outcome = read(source);
        assert!(outcome.is_ok(), "{start}: {outcome:?}");
    }
    for constant in [
        "{{ 'a' * 100000000 }}",
        "{{ [1, 'a'] * 10000 }}",
        "{{ 2 ** 40 * 'a' }}",
        "{{ ('a' * 4000) * 4000 }}",
        "{{ ([1] * 4000) * 4000 == 1 }}",
    ] {
        assert_stopped(constant);
    }
    assert_eq!(outcome("{{ '-' * 10 }}{{ 1024 * 1024 }}"), Ok("----------1048576".to_owned()));
}

#[test]
fn macros_that_call_themselves_end() {
    let deep = |source: &str| {
        let source = source.to_owned();
        std::thread::Builder::new().stack_size(1 << 20).spawn(move || outcome(&source)).unwrap().join().unwrap()
    };
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ [1] | map('f') | list }}{{ caller() }}{% call f() %}{% endcall %}{% endmacro %}{% call f() %}{% endcall %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    ] {
        assert!(deep(source).is_err(), "{source}");
    }
    for source in ["{% include 'chat' %}", "{% extends 'chat' %}", "{% import 'chat' as c %}", "{% from 'chat' import c %}"] {
        assert!(matches!(outcome(source), Err(ChatError::Template(_))), "{source}");
    }
}

#[test]
fn errors_show_no_more_than_a_text() {
    let Err(ChatError::Refused(text)) = outcome("{{ raise_exception('\x1b[2J\u{202e}' ~ 'a' * 4000) }}") else { panic!() };
    assert!(text.starts_with("\u{fffd}[2J\u{fffd}aaa") && text.ends_with('…') && text.chars().count() == 1001, "{text}");
    let name = "\x1b".repeat(9);
    let error = outcome(&format!("{{{{ {{}}['{name}'].x.y }}}}{{{{ 'a' | int('{name}') }}}}")).unwrap_err().to_string();
    assert!(!error.contains('\x1b'), "{error:?}");
}

#[test]
fn long_conversations_are_no_attack() {
    let messages: Vec<Message> =
        (0..2000).map(|nth| Message::new(if nth % 2 == 0 { "user" } else { "assistant" }, "word ".repeat(200))).collect();
    let source = concat!(
        "{% set ns = namespace(last=-1, text='', list=[]) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}",
        "{% endif %}{% set ns.list = ns.list + [m.role] %}{% endfor %}{% for m in messages[::-1] %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content if m.content is string else '' %}{% if '</think>' in content %}x{% endif %}",
        "{% if loop.last or (not loop.last and messages[loop.index0 + 1].role == 'user') %}{% endif %}{% if messages | length > 3 %}{% endif %}",
        "{{ '<' + m.role + '>' + content.split('</think>')[-1].lstrip('\n') | trim }}{{ m | tojson }}{% endfor %}",
    );
    let template = ChatTemplate::from_source(source, String::new(), String::new()).unwrap();
    let text = template.render(&messages, &ChatOptions::default()).unwrap();
    assert!(text.len() > 4_000_000);
}

fn expressions() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "a",
        "b",
        "l",
        "m",
        "ns.a",
        "ns.l",
        "1",
        "0",
        "-1",
        "99999",
        "1000000000000",
        "2.5",
        "'ab'",
        "''",
        "'{0}{0}'",
        "'%s%s'",
        "[1, 2]",
        "[]",
        "{'a': 1}",
        "none",
        "true",
        "x",
        "messages",
        "messages[0]",
        "loop",
        "f",
        "ns",
        "range(1000)",
    ]);
    leaf.prop_map(str::to_owned).prop_recursive(4, 24, 3, |inner| {
        let operator = prop::sample::select(vec!["+", "*", "~", "-", "/", "//", "%", "**", "==", "<", "in", "and", "or", "not in"]);
        let filter = prop::sample::select(vec![
            "length",
            "list",
            "string",
            "tojson",
            "tojson(indent=9)",
            "join",
            "join(a)",
            "replace('a', b)",
            "replace('', a)",
            "indent(99)",
            "sort",
            "unique",
            "reverse",
            "first",
            "last",
            "batch(3)",
            "slice(3)",
            "map('upper')",
            "map('list')",
            "map('string')",
            "select",
            "sum",
            "items",
            "dictsort",
            "groupby(0)",
            "format(a, b)",
            "upper",
            "title",
            "e",
            "trim",
            "trim('ab')",
            "split('a')",
            "lines",
            "default(a)",
            "int",
            "float",
            "abs",
            "round",
            "min",
            "max",
            "attr('a')",
            "selectattr('role')",
            "map(attribute='role')",
        ]);
        let method = prop::sample::select(vec![
            "replace('a', a)",
            "join(l)",
            "join([a, a])",
            "format(a, a)",
            "split()",
            "split('')",
            "splitlines()",
            "strip(b)",
            "count('')",
            "count(a)",
            "find(a)",
            "upper()",
            "items()",
            "keys()",
            "values()",
            "get(a)",
            "get(l)",
            "startswith(l)",
            "endswith(a)",
        ]);
        prop_oneof![
            (inner.clone(), operator, inner.clone()).prop_map(|(a, operator, b)| format!("({a} {operator} {b})")),
            (inner.clone(), filter).prop_map(|(a, filter)| format!("({a}) | {filter}")),
            (inner.clone(), method).prop_map(|(a, method)| format!("({a}).{method}")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a})[{b}]")),
            (inner.clone(), inner.clone(), inner.clone()).prop_map(|(a, b, c)| format!("({a})[{b}:{c}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("[{a}, {b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{'a': {a}, 'b': {b}}}")),
            (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| format!("({a} if {b} else {c})")),
        ]
    })
}

fn statements() -> impl Strategy<Value = String> {
    let name = || prop::sample::select(vec!["a", "b", "l", "m", "ns.a", "ns.l"]);
    let leaf = prop_oneof![
        expressions().prop_map(|e| format!("{{{{ {e} }}}}")),
        (name(), expressions()).prop_map(|(name, e)| format!("{{% set {name} = {e} %}}")),
    ];
    leaf.prop_recursive(3, 16, 4, move |inner| {
        let body = || prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat());
        prop_oneof![
            (expressions(), body()).prop_map(|(e, body)| format!("{{% for x in {e} %}}{body}{{% endfor %}}")),
            body().prop_map(|body| format!("{{% for x in range(200) %}}{body}{{% endfor %}}")),
            (expressions(), body(), body()).prop_map(|(e, a, b)| format!("{{% if {e} %}}{a}{{% else %}}{b}{{% endif %}}")),
            (name(), body()).prop_map(|(name, body)| format!("{{% set {name} %}}{body}{{% endset %}}")),
            body().prop_map(|body| format!("{{% macro f(x) %}}{body}{{% endmacro %}}{{{{ f(a) }}}}")),
            body().prop_map(|body| format!("{{% filter upper %}}{body}{{% endfilter %}}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_template_does_it_ends(parts in prop::collection::vec(statements(), 1..5)) {
        let source = format!("{{% set ns = namespace(a='a', l=[1]) %}}{{% set a = 'ab' %}}{{% set l = [a] %}}{{% set m = {{'a': a}} %}}{}", parts.concat());
        if let Ok(text) = outcome(&source) {
            prop_assert!(text.len() < 3 << 20);
        }
    }
}
