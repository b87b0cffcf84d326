//! Every subcommand has its page, its help and its test; every format has its page.

use std::path::{Path, PathBuf};

use clap::Command;
use vdkit_cli::commands::{Subcommand, all};
use vdkit_cli::definition;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn built() -> Command {
    let mut command = definition::command();
    command.build();
    command
}

fn command_of<'a>(root: &'a Command, entry: &Subcommand) -> &'a Command {
    root.find_subcommand(entry.name).unwrap_or_else(|| panic!("{} is not defined", entry.name))
}

/// A subcommand, and the actions of one that has such: `lab`, `lab-list`.
fn with_actions(command: &Command) -> Vec<(String, &Command)> {
    let name = command.get_name();
    let actions = command.get_subcommands().filter(|action| action.get_name() != "help");
    let named = actions.map(|action| (format!("{name}-{}", action.get_name()), action));
    std::iter::once((name.to_owned(), command)).chain(named).collect()
}

#[test]
fn every_subcommand_of_the_definition_is_in_the_table() {
    for command in built().get_subcommands() {
        let name = command.get_name();
        assert!(name == "help" || all().any(|entry| entry.name == name), "{name}");
    }
}

#[test]
fn every_subcommand_has_help_on_everything() {
    let root = built();
    for entry in all() {
        let name = entry.name;
        let command = command_of(&root, entry);
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        assert!(!about.is_empty() && !about.ends_with('.'), "about of {name}: '{about}'");
        assert!(!about.contains("Arguments of"), "about of {name}: '{about}'");
        let mut examples = 0;
        for line in entry.examples.trim().lines() {
            let fine =
                line.starts_with("vdkit ") || line.starts_with(' ') || line.contains("| vdkit");
            assert!(fine, "example of {name}: '{line}'");
            examples += usize::from(line.contains(&format!("vdkit {name}")));
        }
        assert!(examples >= 2, "{name} has {examples} examples");
        let help = command.clone().render_long_help().to_string();
        assert!(help.contains("Examples:"), "help of {name}");
        for (name, command) in with_actions(command) {
            for argument in command.get_arguments() {
                let id = argument.get_id();
                assert!(argument.get_help().is_some(), "{name}: {id} has no help");
            }
        }
    }
}

#[test]
fn every_subcommand_has_its_page_and_its_test() {
    let root_folder = root();
    let root = built();
    for entry in all() {
        let name = entry.name;
        let page = root_folder.join(format!("docs/commands/{name}.md"));
        let text = std::fs::read_to_string(&page)
            .unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        assert!(text.starts_with(&format!("# vdkit {name}")), "heading of {}", page.display());
        for (_, command) in with_actions(command_of(&root, entry)) {
            for argument in command.get_arguments() {
                let Some(long) = argument.get_long() else { continue };
                if !["help", "version"].contains(&long) {
                    assert!(text.contains(&format!("--{long}")), "{}: --{long}", page.display());
                }
            }
        }
        assert!(tests_of(name).contains("#[test]"), "{name} has no test");
    }
}

/// The tests of a subcommand: NAME.rs, and NAME_MORE.rs where there are many.
fn tests_of(name: &str) -> String {
    let folders = ["apps/cli/tests", "apps/cli/tests/commands"];
    let files = folders.map(|folder| std::fs::read_dir(root().join(folder)).unwrap());
    let names = files.into_iter().flatten().map(|file| file.unwrap().path());
    let own = names.filter(|path| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        path.is_file() && (stem == name || stem.starts_with(&format!("{name}_")))
    });
    own.map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

#[test]
fn every_answer_in_json_has_its_schema() {
    let root = built();
    for entry in all() {
        for (name, command) in with_actions(command_of(&root, entry)) {
            let json = command.get_arguments().any(|a| a.get_long() == Some("json"));
            let schema = self::root().join(format!("docs/schemas/{name}.json"));
            assert_eq!(schema.exists(), json, "{}", schema.display());
            if json {
                assert!(
                    tests_of(entry.name).contains(&format!("json_of(\"{name}\"")),
                    "no test of {} holds an answer of {name} against the schema",
                    entry.name
                );
            }
        }
    }
}

#[test]
fn every_format_has_its_page_and_help_on_every_option() {
    for driver in vdkit::FORMATS {
        let page = root().join(format!("docs/formats/{}.md", driver.name()));
        assert!(page.exists(), "{}", page.display());
        assert!(!driver.info().description.is_empty(), "{}", driver.name());
        for option in driver.options() {
            assert!(!option.help.is_empty(), "{} of {}", option.key, driver.name());
        }
    }
}

#[test]
fn every_export_has_its_page() {
    let folders = std::fs::read_dir(root().join("serve")).unwrap();
    let mut exports = 0;
    for folder in folders {
        let name = folder.unwrap().file_name().into_string().unwrap();
        let name = match name.as_str() {
            "core" => continue,
            "vhost" => "vhost-user",
            name => name,
        };
        let page = root().join(format!("docs/exports/{name}.md"));
        assert!(page.exists(), "{}", page.display());
        exports += 1;
    }
    assert!(exports > 0);
}

#[test]
fn pages_are_of_subcommands_that_exist() {
    for entry in std::fs::read_dir(root().join("docs/commands")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.trim_end_matches(".md");
        let known = all().any(|entry| entry.name == name) || name == "README";
        assert!(known, "docs/commands/{name}.md is of no subcommand");
    }
}
