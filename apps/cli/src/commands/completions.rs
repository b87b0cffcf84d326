//! `vdkit completions`: prints completion scripts for shells.

use clap::Args;
use clap_complete::Shell;

use super::{Run, Subcommand, runs};
use crate::definition;
use crate::failure::{Exit, Outcome};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "completions",
    about: "Print the completion script of a shell",
    examples: "
vdkit completions bash > /etc/bash_completion.d/vdkit
vdkit completions zsh > ~/.zfunc/_vdkit
vdkit completions fish > ~/.config/fish/completions/vdkit.fish
",
    ..runs::<CompletionsArgs>()
};

#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

impl Run for CompletionsArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut definition::command(), "vdkit", &mut script);
        session.out.bytes(&script);
        Ok(Exit::Done)
    }
}
