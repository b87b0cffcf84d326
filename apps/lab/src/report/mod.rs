//! Writes a run as one HTML file. The file needs no script, font, picture or style from elsewhere,
//! so that it can be mailed, kept and read without a network.
//!
//! ```text
//!   Run ─► verdict ─► head      advice, confidence, setup
//!       ─► matrix  ─► results   every cell: bar, interval, comparison with the default
//!                  ─► heat      any two axes
//!                  ─► charts    queue depth, latencies, time
//!                  ─► published, peers
//!                  ─► evidence  commands, samples, the machine
//! ```
//!
//! All content is there without JavaScript. A script of a hundred lines adds filters, the choice of
//! the map's axes, copy buttons, and the theme switch. The page's content security policy allows
//! this script by its hash, and nothing else. Texts contain file names and output of programs, so
//! all of them go through maud, which escapes them.

mod charts;
mod data;
mod evidence;
mod head;
mod loads;
mod published;
mod results;
mod theme;

use base64::prelude::{BASE64_STANDARD, Engine};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest, Sha256};

use crate::matrix::Matrix;
use crate::model::Run;
use crate::verdict::{Verdict, verdict};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The report of a run.
pub fn html(run: &Run) -> String {
    let verdict = verdict(run);
    let title = format!("{} – vdkit lab", run.plan.title);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(policy());
                meta name="color-scheme" content="light dark";
                meta name="generator" content={"vdkit " (run.vdkit_version)};
                title { (title) }
                style { (PreEscaped(theme::variables())) (PreEscaped(STYLE)) }
            }
            body {
                a class="skip" href="#verdict" { "Skip to the verdict" }
                (body(run, &verdict))
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// The content security policy: nothing is loaded, and one script is allowed by its hash. Source:
/// W3C, Content Security Policy Level 3, 2.3.1 "Source Lists".
fn policy() -> String {
    let hash = BASE64_STANDARD.encode(&Sha256::digest(SCRIPT.as_bytes())[..]);
    format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hash}'; base-uri 'none'; form-action 'none'"
    )
}

/// A section of the page with its entry in the table of contents.
struct Part {
    id: &'static str,
    title: &'static str,
    body: Markup,
}

fn body(run: &Run, verdict: &Verdict) -> Markup {
    let matrix = Matrix::new(run);
    let mut parts = Vec::new();
    let mut add = |id, title, body: Option<Markup>| {
        parts.extend(body.map(|body| Part { id, title, body }));
    };
    if let Some(matrix) = &matrix {
        let colors = loads::Colors::of(matrix, verdict);
        add("answers", "Question by question", head::answers(verdict));
        add("results", "All results", results::results(matrix, verdict));
        add("map", "The matrix at a glance", data::map(matrix));
        add("depth", "Requests against latency", loads::depth(matrix, &colors));
        add("latency", "How long requests take", loads::latency(matrix, verdict, &colors));
        add("time", "The loads over time", loads::time_of(matrix, verdict, &colors));
        add("scores", "Weighted scores", results::scores(matrix, verdict));
        add("peers", "Compared with other tools", published::peers(matrix, verdict));
        add("published", "Published and measured", published::published(matrix));
    }
    add("missing", "Not measured", evidence::missing(run));
    add("words", "What the names mean", evidence::words(run));
    add("commands", "The exact commands", evidence::commands(run));
    add("samples", "Every sample", evidence::samples(run));
    add("machine", "The machine", evidence::machine(run));
    add("method", "How this was measured and evaluated", Some(evidence::method()));
    html! {
        header class="top" { (head::top(run)) }
        main {
            (head::verdict(run, verdict))
            nav aria-label="Contents" class="contents" {
                ul { @for part in &parts { li { a href={"#" (part.id)} { (part.title) } } } }
            }
            @for part in &parts {
                section id=(part.id) aria-labelledby={(part.id) "-h"} {
                    h2 id={(part.id) "-h"} { (part.title) }
                    (part.body)
                }
            }
        }
        footer {
            p {
                "Made by vdkit " (run.vdkit_version) " from the run " code { (run.id) }
                ". This file needs no network and sends nothing."
            }
        }
    }
}

#[cfg(test)]
mod tests;
