//! Runs the cases by two programs: `run --candidate PATH [--reference PATH] [--filter TEXT]
//! [--shown N] [--jobs N]`.

use std::path::Path;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let mut cases = vdkit_differential::cases::all();
    if let Some(filter) = value("--filter") {
        cases.retain(|case| case.line().contains(&filter));
    }
    let shown = value("--shown").and_then(|text| text.parse().ok()).unwrap_or(2);
    let jobs = value("--jobs").and_then(|text| text.parse().ok()).unwrap_or(2);
    let reference = value("--reference").unwrap_or_else(|| "/usr/bin/qemu-img".to_owned());
    let candidate = value("--candidate").expect("--candidate PATH");
    let (reference, candidate) = (Path::new(&reference), Path::new(&candidate));
    let summary = vdkit_differential::run(reference, candidate, &cases, jobs);
    print!("{}", summary.report(shown));
}
