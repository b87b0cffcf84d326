//! `vdkit man`: prints manual pages.

use std::path::{Path, PathBuf};

use clap::{Args, Command, ValueHint};
use clap_mangen::Man;

use super::{Run, Subcommand, runs};
use crate::definition;
use crate::failure::{Exit, Failure, Outcome};
use crate::output::write_file;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "man",
    about: "Print a manual page, or write every page to a folder",
    examples: "
vdkit man | man -l -                  read the main page
vdkit man --page convert | man -l -   read the page of one command
vdkit man /usr/local/share/man/man1   write vdkit.1 and one page per command
",
    ..runs::<ManArgs>()
};

#[derive(Args, Debug)]
pub struct ManArgs {
    /// Write all pages to this folder, which is created if it is missing
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
    /// Print the page of this command instead of the main page
    #[arg(long, value_name = "COMMAND", conflicts_with = "dir")]
    page: Option<String>,
}

impl Run for ManArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let mut root = definition::command();
        root.build();
        if let Some(dir) = &self.dir {
            if let Some(name) = dir.to_str().filter(|name| super::find(name).is_some())
                && !dir.exists()
            {
                let text = format!("'{name}' is a command, and DIR a folder for all pages");
                return Err(Failure::usage(text).hint(format!(
                    "'vdkit man --page {name}' prints its page; a folder of this name is './{name}'"
                )));
            }
            return write_all(root, dir);
        }
        let page = match self.page {
            None => root,
            Some(name) => root
                .get_subcommands()
                .find(|command| command.get_name() == name)
                .cloned()
                .ok_or_else(|| Failure::usage(format!("no command is called '{name}'")))?,
        };
        session.out.bytes(&render(page)?);
        Ok(Exit::Done)
    }
}

fn write_all(root: Command, dir: &Path) -> Outcome {
    std::fs::create_dir_all(dir)
        .map_err(|error| Failure::failed(format!("{}: cannot write: {error}", dir.display())))?;
    let mut pages: Vec<Command> =
        root.get_subcommands().filter(|command| command.get_name() != "help").cloned().collect();
    pages.push(root);
    for page in pages {
        let path = dir.join(format!("{}.1", page_name(&page)));
        write_file(&path, &render(page)?)?;
    }
    Ok(Exit::Done)
}

fn page_name(page: &Command) -> String {
    match page.get_name() {
        "vdkit" => "vdkit".to_owned(),
        name => format!("vdkit-{name}"),
    }
}

fn render(page: Command) -> Result<Vec<u8>, Failure> {
    let name = page_name(&page);
    let entry = super::find(page.get_name());
    let mut text = Vec::new();
    let man = Man::new(page)
        .title(name.to_uppercase())
        .source(concat!("vdkit ", env!("CARGO_PKG_VERSION")))
        .manual("vdkit manual");
    man.render_title(&mut text)
        .and_then(|()| man.render_name_section(&mut text))
        .and_then(|()| man.render_synopsis_section(&mut text))
        .and_then(|()| man.render_description_section(&mut text))
        .and_then(|()| man.render_options_section(&mut text))
        .map_err(|error| Failure::failed(format!("cannot make the page: {error}")))?;
    match entry {
        Some(entry) => literal(&mut text, "EXAMPLES", entry.examples.trim()),
        None => literal(&mut text, "COMMANDS", definition::overview().trim()),
    }
    literal(&mut text, "EXIT STATUS", definition::EXIT_CODES);
    Ok(text)
}

/// Adds a section whose lines are not filled.
fn literal(page: &mut Vec<u8>, heading: &str, lines: &str) {
    page.extend_from_slice(format!(".SH \"{heading}\"\n.nf\n").as_bytes());
    for line in lines.lines() {
        // roff would read a leading dot or quote as a request.
        page.extend_from_slice(b"\\&");
        page.extend_from_slice(line.replace('\\', "\\e").replace('-', "\\-").as_bytes());
        page.push(b'\n');
    }
    page.extend_from_slice(b".fi\n");
}
