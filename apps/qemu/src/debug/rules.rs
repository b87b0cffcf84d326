//! When requests fail: rules from a file or from properties, and how events and states choose among
//! them.

use crate::failure::system_words;
use crate::names::{Flat, switch_of};

/// QEMU's events. Those that [`super::faulty`] raises are named there.
const EVENTS: &[&str] = &[
    "l1_update",
    "l1_grow_alloc_table",
    "l1_grow_write_table",
    "l1_grow_activate_table",
    "l2_load",
    "l2_update",
    "l2_update_compressed",
    "l2_alloc_cow_read",
    "l2_alloc_write",
    "read_aio",
    "read_backing_aio",
    "read_compressed",
    "write_aio",
    "write_compressed",
    "vmstate_load",
    "vmstate_save",
    "cow_read",
    "cow_write",
    "reftable_load",
    "reftable_grow",
    "reftable_update",
    "refblock_load",
    "refblock_update",
    "refblock_update_part",
    "refblock_alloc",
    "refblock_alloc_hookup",
    "refblock_alloc_write",
    "refblock_alloc_write_blocks",
    "refblock_alloc_write_table",
    "refblock_alloc_switch_table",
    "cluster_alloc",
    "cluster_alloc_bytes",
    "cluster_free",
    "flush_to_os",
    "flush_to_disk",
    "pwritev_rmw_head",
    "pwritev_rmw_after_head",
    "pwritev_rmw_tail",
    "pwritev_rmw_after_tail",
    "pwritev",
    "pwritev_zero",
    "pwritev_done",
    "empty_image_prepare",
    "l1_shrink_write_table",
    "l1_shrink_free_l2_clusters",
    "cor_write",
    "cluster_alloc_space",
    "none",
];

/// Kinds of requests, by QEMU's names.
const KINDS: &[&str] = &["read", "write", "write-zeroes", "discard", "flush", "block-status"];

/// The error of a rule that names none: EIO.
const DEFAULT_ERRNO: i32 = 5;
/// Bytes of a sector.
const SECTOR: u64 = 512;

/// A kind of request, as an index of the names that rules use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    WriteZeroes,
    Discard,
    Flush,
}

/// A rule by which requests fail.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Inject {
    event: String,
    /// The state in which the rule counts; 0 for any.
    state: u64,
    errno: i32,
    /// The byte that a request must touch.
    at: Option<u64>,
    once: bool,
    /// Kinds of requests, by index of [`KINDS`].
    kinds: Vec<bool>,
}

/// A rule by which the state changes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    event: String,
    state: u64,
    new_state: u64,
}

/// The rules of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    injects: Vec<Inject>,
    changes: Vec<Change>,
}

impl Rules {
    pub fn read(file: Option<&str>) -> Result<Self, String> {
        let mut rules = Self::default();
        let Some(file) = file else { return Ok(rules) };
        let text = std::fs::read_to_string(file).map_err(|error| {
            format!("Could not read blkdebug config file: {}", system_words(&error))
        })?;
        let mut group: Option<(String, Flat)> = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                let name = name.split_whitespace().next().unwrap_or_default();
                if !["inject-error", "set-state"].contains(&name) {
                    return Err(format!("There is no option group '{name}'"));
                }
                rules.add_group(group.replace((name.to_owned(), Flat::default())))?;
                continue;
            }
            let pair = line.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
            match (&mut group, pair) {
                (Some((_, values)), Some((key, value))) => {
                    values.put(key, value.trim_matches('"'));
                }
                (None, Some(_)) => return Err("no group defined".to_owned()),
                (_, None) => return Err(format!("{file}:{}: parse error", number + 1)),
            }
        }
        rules.add_group(group)?;
        Ok(rules)
    }

    fn add_group(&mut self, group: Option<(String, Flat)>) -> Result<(), String> {
        group.map_or(Ok(()), |(name, values)| self.add(&name, values))
    }

    /// Takes `inject-error.N.…` and `set-state.N.…`.
    pub fn add_properties(&mut self, flat: &mut Flat) -> Result<(), String> {
        for name in ["inject-error", "set-state"] {
            let mut below = flat.take_below(name);
            for number in 0.. {
                let values = below.take_below(&number.to_string());
                if values.is_empty() {
                    break;
                }
                self.add(name, values)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str, mut values: Flat) -> Result<(), String> {
        let known: &[&str] = match name {
            "set-state" => &["event", "state", "new_state"],
            _ => &["event", "state", "errno", "sector", "once", "immediately", "iotype"],
        };
        if let Some(key) = values.keys().find(|key| !known.contains(key)) {
            return Err(format!("Invalid parameter '{key}'"));
        }
        let event = values.take("event").ok_or("Missing event name for rule")?;
        if !EVENTS.contains(&event.as_str()) {
            return Err(format!("invalid parameter value: {event}"));
        }
        let state = number(&mut values, "state")?.unwrap_or(0);
        if name == "set-state" {
            let new_state = number(&mut values, "new_state")?.unwrap_or(0);
            self.changes.push(Change { event, state, new_state });
        } else {
            let errno = number(&mut values, "errno")?.map_or(DEFAULT_ERRNO, |errno| errno as i32);
            let at = number(&mut values, "sector")?.map(|sector| sector.saturating_mul(SECTOR));
            let once = switch(&mut values, "once")?;
            // A request fails at once here in either case: it has no time between start and end.
            switch(&mut values, "immediately")?;
            let kinds = kinds(values.take("iotype"))?;
            self.injects.push(Inject { event, state, errno, at, once, kinds });
        }
        Ok(())
    }
}

fn number(values: &mut Flat, key: &str) -> Result<Option<u64>, String> {
    let Some(text) = values.take(key) else { return Ok(None) };
    match text.strip_prefix("0x") {
        // A rule without a sector has sector -1 in QEMU's own words.
        _ if key == "sector" && text == "-1" => Ok(None),
        Some(hex) => u64::from_str_radix(hex, 16).map(Some).map_err(|_| wrong_number(key)),
        None => text.parse().map(Some).map_err(|_| wrong_number(key)),
    }
}

fn wrong_number(key: &str) -> String {
    format!("Parameter '{key}' expects a number")
}

fn switch(values: &mut Flat, key: &str) -> Result<bool, String> {
    values.take(key).map_or(Ok(false), |text| switch_of(key, &text))
}

/// The kinds of requests that fail; all but block status unless one is named.
fn kinds(named: Option<String>) -> Result<Vec<bool>, String> {
    match named {
        None => Ok(KINDS.iter().map(|kind| *kind != "block-status").collect()),
        Some(named) if KINDS.contains(&named.as_str()) => {
            Ok(KINDS.iter().map(|kind| *kind == named).collect())
        }
        Some(named) => Err(format!("invalid parameter value: {named}")),
    }
}

/// The rules of an open node, and where they are.
#[derive(Debug)]
pub struct Machine {
    rules: Rules,
    state: u64,
    /// Indices of the rules that fail requests now, the newest first.
    active: Vec<usize>,
}

impl Machine {
    /// Rules at the start, where the event `none` has happened.
    pub fn new(rules: Rules) -> Self {
        let mut this = Self { rules, state: 1, active: Vec::new() };
        this.raise("none");
        this
    }

    /// An event has happened: rules for it become active in place of earlier ones, and the state
    /// changes.
    pub fn raise(&mut self, event: &str) {
        let state = self.state;
        let counts = |of: &str, needed: u64| of == event && (needed == 0 || needed == state);
        let injects = self.rules.injects.iter().enumerate();
        let active: Vec<_> = injects
            .filter(|(_, rule)| counts(&rule.event, rule.state))
            .map(|(index, _)| index)
            .collect();
        if !active.is_empty() {
            self.active = active.into_iter().rev().collect();
        }
        let mut changes = self.rules.changes.iter();
        if let Some(change) = changes.rfind(|rule| counts(&rule.event, rule.state)) {
            self.state = change.new_state;
        }
    }

    /// The error number of a request that fails; a rule for one failure ends with it.
    pub fn fails(&mut self, kind: Kind, offset: u64, len: u64) -> Option<i32> {
        let hit = |rule: &Inject| {
            let touched = |at: u64| len > 0 && at >= offset && at - offset < len;
            rule.kinds[kind as usize] && rule.at.is_none_or(touched)
        };
        let place = self.active.iter().position(|index| hit(&self.rules.injects[*index]))?;
        let rule = &self.rules.injects[self.active[place]];
        let errno = rule.errno;
        if rule.once {
            self.active.remove(place);
        }
        // A rule with error 0 lets its requests pass.
        (errno != 0).then_some(errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Result<Rules, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rules");
        std::fs::write(&file, text).unwrap();
        Rules::read(file.to_str())
    }

    #[test]
    fn states_and_rules_for_once_are_followed() {
        let text = "# a comment\n[set-state]\nevent = \"read_aio\"\nstate = \"1\"\nnew_state = \"2\"\n\n\
                    [inject-error]\nevent = \"read_aio\"\nstate = \"2\"\nerrno = \"28\"\nonce = \"on\"\n\
                    sector = \"3\"\niotype = \"read\"\n";
        let mut machine = Machine::new(rules(text).unwrap());
        machine.raise("read_aio");
        assert_eq!(machine.fails(Kind::Read, 0, 4096), None);
        machine.raise("read_aio");
        assert_eq!(machine.fails(Kind::Write, 0, 4096), None);
        assert_eq!(machine.fails(Kind::Read, 0, 1536), None);
        assert_eq!(machine.fails(Kind::Read, 1024, 1024), Some(28));
        assert_eq!(machine.fails(Kind::Read, 1024, 1024), None);
    }

    #[test]
    fn the_event_none_has_happened_at_the_start() {
        let mut flat = Flat::default();
        flat.put("inject-error.0.event", "none");
        let mut rules = Rules::default();
        rules.add_properties(&mut flat).unwrap();
        assert!(flat.is_empty());
        let mut machine = Machine::new(rules);
        assert_eq!(machine.fails(Kind::Flush, 0, 0), Some(DEFAULT_ERRNO));
    }

    #[test]
    fn wrong_rules_are_told_in_qemus_words() {
        for (text, words) in [
            ("[inject-error]\nevent = \"foo\"", "invalid parameter value: foo"),
            ("[foo]\n", "There is no option group 'foo'"),
            ("[inject-error]\nevent = \"none\"\nfoo = \"1\"", "Invalid parameter 'foo'"),
            ("[inject-error]\nerrno = \"5\"", "Missing event name for rule"),
        ] {
            assert_eq!(rules(text).unwrap_err(), words, "{text}");
        }
        let missing = Rules::read(Some("/nothere")).unwrap_err();
        assert_eq!(missing, "Could not read blkdebug config file: No such file or directory");
    }
}
