//! Parses plans. Errors give the file, the line, the key, and what would be valid.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use serde::Deserialize;
use toml::{Spanned, Value};
use vdkit_block::parse_size;

use super::{Axis, Effort, Plan};
use crate::axes;
use crate::cells::product;
use crate::metrics::{METRICS, metric};
use crate::model::{Axes, PlaceKind, Published};

type Words = BTreeMap<Spanned<String>, Spanned<Value>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Spanned<String>,
    title: String,
    question: String,
    metric: Spanned<String>,
    places: Option<Vec<Spanned<String>>>,
    axis: Vec<AxisTable>,
    #[serde(default)]
    include: Vec<Spanned<Words>>,
    #[serde(default, rename = "quick-include")]
    quick_include: Vec<Spanned<Words>>,
    #[serde(default)]
    exclude: Vec<Words>,
    baseline: Option<Words>,
    full: EffortTable,
    quick: EffortTable,
    #[serde(default)]
    published: Vec<PublishedTable>,
    #[serde(default)]
    differs: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AxisTable {
    name: Spanned<String>,
    values: Vec<Spanned<String>>,
    quick: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    condition: bool,
    #[serde(default)]
    on: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EffortTable {
    rounds: Spanned<u32>,
    seconds: Spanned<f64>,
    disk: Spanned<String>,
    bytes: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PublishedTable {
    axes: Words,
    metric: Spanned<String>,
    value: f64,
    source: String,
}

/// The source text, for the line numbers of errors.
struct Place<'a> {
    file: &'a str,
    text: &'a str,
}

impl Place<'_> {
    fn error(&self, at: usize, what: impl std::fmt::Display) -> crate::Error {
        let line = 1 + self.text.bytes().take(at).filter(|byte| *byte == b'\n').count();
        Error::msg(format!("{}: line {line}: {what}", self.file))
    }

    fn at<T>(&self, spanned: &Spanned<T>, what: impl std::fmt::Display) -> crate::Error {
        self.error(spanned.span().start, what)
    }

    /// Checks a value of an axis.
    fn value(&self, axis: &str, value: &Spanned<String>) -> Result<String> {
        match axes::check(axis, value.get_ref()) {
            Ok(()) => Ok(value.get_ref().clone()),
            Err(fault) => Err(self.at(value, fault)),
        }
    }

    /// Parses a table whose keys are axes of the plan, with one value or a list for each.
    fn words(&self, table: &Words, known: &[&str]) -> Result<Vec<(String, Vec<String>)>> {
        let mut all = Vec::new();
        for (axis, value) in table {
            let name = axis.get_ref();
            if !known.contains(&name.as_str()) {
                let known = known.join(", ");
                return Err(
                    self.at(axis, format!("'{name}' is not an axis of this plan; axes: {known}"))
                );
            }
            let texts: Option<Vec<&str>> = match value.get_ref() {
                Value::String(text) => Some(vec![text]),
                Value::Array(list) => list.iter().map(Value::as_str).collect(),
                _ => None,
            };
            let Some(texts) = texts else {
                return Err(self.at(value, format!("{name}: expected \"value\" or [\"value\", …]")));
            };
            for text in &texts {
                axes::check(name, text).map_err(|fault| self.at(value, fault))?;
            }
            all.push((name.clone(), texts.into_iter().map(str::to_owned).collect()));
        }
        Ok(all)
    }

    /// Parses a table with one value for each axis.
    fn single(&self, table: &Words, known: &[&str]) -> Result<Axes> {
        let words = self.words(table, known)?;
        for ((name, values), (_, at)) in words.iter().zip(table) {
            if values.len() != 1 {
                return Err(
                    self.at(at, format!("{name}: expected one value, found {}", values.len()))
                );
            }
        }
        Ok(words.into_iter().map(|(name, mut values)| (name, values.remove(0))).collect())
    }

    /// Parses cells: one value or several for each axis of `known`. Returns every combination.
    fn cells(&self, tables: &[Spanned<Words>], known: &[&str]) -> Result<Vec<Axes>> {
        let mut all = Vec::new();
        for table in tables {
            let words = self.words(table.get_ref(), known)?;
            let mut cells = vec![Axes::new()];
            for name in known {
                let Some((_, values)) = words.iter().find(|(axis, _)| axis == name) else {
                    return Err(self.at(table, format!("include: a value for '{name}' is missing")));
                };
                cells = product(&cells, name, values);
            }
            all.extend(cells);
        }
        Ok(all)
    }

    fn effort(&self, table: &EffortTable) -> Result<Effort> {
        let size = |text: &Spanned<String>| {
            let size = self.value("size", text)?;
            parse_size(&size).map_err(|error| self.at(text, error))
        };
        let (rounds, seconds) = (*table.rounds.get_ref(), *table.seconds.get_ref());
        if !(1..=1000).contains(&rounds) {
            let told = format!("rounds: expected 1 to 1000, found {rounds}");
            return Err(self.at(&table.rounds, told));
        }
        if !(0.1..=86_400.0).contains(&seconds) {
            let told = format!("seconds: expected 0.1 to 86400, found {seconds}");
            return Err(self.at(&table.seconds, told));
        }
        Ok(Effort { rounds, seconds, disk: size(&table.disk)?, bytes: size(&table.bytes)? })
    }

    fn metric(&self, key: &Spanned<String>) -> Result<String> {
        if metric(key.get_ref()).is_some() {
            return Ok(key.get_ref().clone());
        }
        let known: Vec<&str> = METRICS.iter().map(|metric| metric.key).collect();
        Err(self
            .at(key, format!("unknown metric '{}'; known: {}", key.get_ref(), known.join(", "))))
    }

    fn axis(&self, table: &AxisTable) -> Result<Axis> {
        let name = table.name.get_ref();
        if name == axes::BACKEND {
            let told =
                "the axis 'backend' is in every plan; its values come from --on and --device";
            return Err(self.at(&table.name, told));
        }
        if axes::about(name).is_none() {
            let known = axes::names().join(", ");
            return Err(self.at(&table.name, format!("unknown axis '{name}'; known: {known}")));
        }
        let list = |values: &[Spanned<String>]| -> Result<Vec<String>> {
            values.iter().map(|value| self.value(name, value)).collect()
        };
        let values = list(&table.values)?;
        let quick = table.quick.as_deref().map_or_else(|| Ok(values.clone()), list)?;
        for list in [&values, &quick] {
            let twice = list.iter().enumerate().find(|(i, value)| list[..*i].contains(value));
            if list.is_empty() || twice.is_some() {
                return Err(self.at(&table.name, format!("{name}: expected values, each once")));
            }
        }
        if !table.on.is_empty() && quick[0] != values[0] {
            let told = "the first value, used on other file systems, must be the same in quick and full runs";
            return Err(self.at(&table.name, format!("{name}: {told}")));
        }
        let (condition, on) = (table.condition, table.on.clone());
        Ok(Axis { name: name.clone(), values, quick, condition, on })
    }

    fn places(&self, words: Option<&[Spanned<String>]>) -> Result<Vec<PlaceKind>> {
        let Some(words) = words else { return Ok(vec![PlaceKind::Directory, PlaceKind::Device]) };
        let kind = |word: &Spanned<String>| match word.get_ref().as_str() {
            "directory" => Ok(PlaceKind::Directory),
            "device" => Ok(PlaceKind::Device),
            other => {
                Err(self.at(word, format!("unknown place '{other}'; known: directory, device")))
            }
        };
        words.iter().map(kind).collect()
    }
}

/// Implements [`Plan::parse`].
pub(super) fn parse(text: &str, name: &str) -> Result<Plan> {
    let place = Place { file: name, text };
    let file: File = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        place.error(at, error.message())
    })?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if file.name.get_ref().is_empty() || !file.name.get_ref().chars().all(plain) {
        let told =
            format!("name: expected letters, digits and '-', found '{}'", file.name.get_ref());
        return Err(place.at(&file.name, told));
    }
    let axes = file.axis.iter().map(|table| place.axis(table)).collect::<Result<Vec<_>>>()?;
    for (i, table) in file.axis.iter().enumerate() {
        if axes[..i].iter().any(|axis| axis.name == *table.name.get_ref()) {
            let name = table.name.get_ref();
            return Err(place.at(&table.name, format!("the axis '{name}' is defined twice")));
        }
    }
    if !axes.iter().any(|axis| axis.name == "profile") {
        return Err(place.error(0, "the axis 'profile' (the load) is missing"));
    }
    let mut known: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
    let include = place.cells(&file.include, &known)?;
    let quick_include = place.cells(&file.quick_include, &known)?;
    known.push(axes::BACKEND);
    let exclude = file.exclude.iter().map(|table| place.words(table, &known));
    let published = file.published.iter().map(|table| {
        Ok(Published {
            axes: place.single(&table.axes, &known)?,
            metric: place.metric(&table.metric)?,
            value: table.value,
            source: table.source.clone(),
        })
    });
    Ok(Plan {
        exclude: exclude.collect::<Result<_>>()?,
        baseline: file.baseline.as_ref().map(|table| place.single(table, &known)).transpose()?,
        published: published.collect::<Result<_>>()?,
        name: file.name.get_ref().clone(),
        title: file.title,
        differs: file.differs,
        question: file.question,
        metric: place.metric(&file.metric)?,
        places: place.places(file.places.as_deref())?,
        full: place.effort(&file.full)?,
        quick: place.effort(&file.quick)?,
        axes,
        include,
        quick_include,
        text: text.to_owned(),
    })
}
