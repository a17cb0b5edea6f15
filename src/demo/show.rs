//! What a demonstration shows.

use std::io::Write;
use std::time::Instant;

use serde_json::{Value, json};
use shoal::LocalModel;
use shoal::api::state::{Instance, PlanLine};

use super::chaos::Tally;
use super::crew::Crew;
use crate::cli::{Asked, Client, Event, Failure, Summary, note, plan_table, say, size_text, stage_table, words_of};

/// Where it is shown: on standard output, or beside it where that is for JSON.
#[derive(Debug)]
pub(super) struct Show {
    json: bool,
}

impl Show {
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    fn line(&self, text: &str) {
        if self.json {
            note!("{text}");
        } else {
            say!("{text}");
        }
    }

    pub(super) fn step(&self, text: &str) {
        self.line(&format!("· {text}"));
    }

    pub(super) fn nodes(&self, crew: &Crew) {
        for member in crew.members() {
            let port = member.control.first().and_then(|address| address.rsplit_once(':')).map_or("?", |(_, port)| port);
            let short = member.id.get(..10).unwrap_or(&member.id);
            self.line(&format!("    {}  {short}  process {}  control port {port}  http://{}", member.name, member.pid, member.api));
        }
    }

    pub(super) fn plan(&self, model: &LocalModel, plan: &PlanLine) {
        self.step(&format!("the plan for {} ({}):", model.name, size_text(model.bytes)));
        self.line(&plan_table(plan));
    }

    pub(super) fn loaded(&self, instance: &Instance, plan: &PlanLine) {
        if instance.stages != plan.stages {
            self.step("the nodes' figures have changed since, so it was placed another way:");
            self.line(&stage_table(&instance.stages).to_string());
        }
        self.step("each node has leased its memory and loaded its own layers");
    }

    pub(super) fn stages(&self, instance: &Instance) {
        self.step(&format!("{} is placed on", instance.model));
        self.line(&stage_table(&instance.stages).to_string());
    }

    /// What a disturbed cluster came to; `left` says what its nodes left behind.
    pub(super) fn tally(&self, tally: &Tally, nodes: u32, seed: u64, left: Option<&Failure>) {
        self.step(&tally.words());
        tally.wrongs().for_each(|wrong| self.line(&format!("    {wrong}")));
        if self.json {
            let mut object = tally.json();
            object["nodes"] = Value::from(nodes);
            object["seed"] = Value::from(seed);
            object["left_over"] = left.map_or(Value::Null, |left| Value::from(left.to_string()));
            return self.json(&object);
        }
        self.line("    killed                    pauses   half within   95 of 100 within");
        for [what, count, half, most] in tally.rows() {
            self.line(&format!("    {what:24} {count:>7}   {half:>11}   {most:>16}"));
        }
    }

    pub(super) fn question(&self, prompt: &str) {
        self.line(&format!("\n> {prompt}\n"));
    }

    /// Asks, and shows the answer as it comes.
    pub(super) async fn answer(&self, asked: &Asked, client: &Client) -> Result<Value, Failure> {
        let started = Instant::now();
        let mut first = None;
        let mut text = String::new();
        let mut summary = Summary::default();
        let mut answer = asked.ask(client).await?;
        while let Some(event) = answer.next().await {
            match event? {
                Event::Text(piece) => {
                    first.get_or_insert_with(|| started.elapsed());
                    text.push_str(&piece);
                    if !self.json {
                        let mut stdout = std::io::stdout().lock();
                        let _ = stdout.write_all(piece.as_bytes()).and_then(|()| stdout.flush());
                    }
                }
                Event::End(end) => summary = end,
            }
        }
        let first = first.unwrap_or_else(|| started.elapsed()).as_secs_f64();
        self.line(if self.json { &text } else { "\n" });
        self.step(&format!("{}, first token after {first:.2} s", words_of(&summary)));
        Ok(json!({
            "text": text,
            "tokens": summary.tokens,
            "token_ids": summary.token_ids,
            "prompt_tokens": summary.prompt_tokens,
            "finish_reason": summary.finish_reason,
            "prefill_tok_s": summary.prefill_tok_s,
            "decode_tok_s": summary.decode_tok_s,
            "first_token_seconds": first,
        }))
    }

    pub(super) fn json(&self, object: &Value) {
        say!("{object}");
    }

    pub(super) fn endpoints(&self, crew: &Crew, model: &str) {
        self.step("serving until Ctrl-C; any node answers:");
        for member in crew.members() {
            self.line(&format!("    http://{}/v1", member.api));
        }
        if let Some(member) = crew.members().first() {
            let body = json!({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": true});
            self.line(&format!("    curl -N http://{}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", member.api));
        }
    }
}
