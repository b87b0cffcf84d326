//! `vdkit completions`.

use crate::common::Scratch;

#[test]
fn every_shell_gets_a_script_with_every_subcommand() {
    let scratch = Scratch::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = scratch.ok(&["completions", shell]).stdout;
        for entry in vdkit_cli::commands::all() {
            assert!(script.contains(entry.name), "{shell}: {}", entry.name);
        }
        assert!(script.contains("allow-ref"), "{shell} knows no options");
    }
}

#[test]
fn bash_takes_the_script_and_completes() {
    let scratch = Scratch::new();
    let script = scratch.ok(&["completions", "bash"]).bytes;
    scratch.write("vdkit.bash", &script);
    let lines = "source vdkit.bash; COMP_WORDS=(vdkit inf); COMP_CWORD=1; \
                 _vdkit vdkit inf vdkit; echo \"${COMPREPLY[@]}\"";
    let output = std::process::Command::new("bash")
        .args(["--norc", "-c", lines])
        .current_dir(scratch.path(""))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "info", "{output:?}");
}

#[test]
fn an_unknown_shell_is_a_usage_error() {
    Scratch::new().fails(2, "'tcsh'", &["completions", "tcsh"]);
}
