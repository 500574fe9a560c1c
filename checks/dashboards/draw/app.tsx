// Draws one dashboard whose queries have been answered: GET /board.json is the dashboard, with `answers` per panel.
// From Grafana: panel frames, time series, stats, tables, units, thresholds, mappings, overrides, transformations.
// Not in npm, so made here: the state timeline's rectangles (their colours and texts are Grafana's) and row headings.
import React, { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import {
  applyFieldOverrides, cacheFieldDisplayNames, createTheme, DataFrame, dateTime, Field, FieldType, formattedValueToString, getFieldDisplayValues,
  Registry, renderLegendFormat, standardTransformers, standardTransformersRegistry, ThemeContext, toDataFrame, transformDataFrame,
} from '@grafana/data';
import * as UI from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { firstValueFrom } from 'rxjs';

const { BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } = UI as any;
const COLUMN = 62, UNIT = 38, GAP = 8; // Grafana's grid: a unit is 30 pixels and a gap of 8
const theme = createTheme({ colors: { mode: 'dark' } });
const failures: string[] = [];
const plain = (text: string) => text;

// What core's registry of field options does for these is to take the value as it stands.
const OPTIONS = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'thresholds', 'mappings', 'links', 'color'];
const CUSTOM = [
  'align', 'axisLabel', 'axisPlacement', 'axisSoftMax', 'axisSoftMin', 'cellOptions', 'drawStyle', 'fillOpacity', 'gradientMode',
  'hideFrom', 'lineInterpolation', 'lineStyle', 'lineWidth', 'minWidth', 'pointSize', 'scaleDistribution', 'showPoints', 'spanNulls',
  'stacking', 'thresholdsStyle', 'width',
];
const option = (name: string, isCustom: boolean) => ({
  id: isCustom ? `custom.${name}` : name, path: name, name, isCustom, editor: null, override: null, settings: {},
  process: (value: unknown) => value, shouldApply: () => true,
});
const registry: any = new (Registry as any)(() => [...OPTIONS.map((o) => option(o, false)), ...CUSTOM.map((o) => option(o, true))]);
const transformers = new Map<string, any>(Object.values<any>(standardTransformers).filter((t) => t?.id).map((t) => [t.id, t]));
(standardTransformersRegistry as any).setInit(() =>
  [...transformers.values()].map((t) => ({ id: t.id, name: t.name, transformation: t, editor: null })));

function frames(target: any, answer: any[]): DataFrame[] {
  if (target.format === 'table') {
    const labels = [...new Set(answer.flatMap((series) => Object.keys(series.metric)))].sort() as string[];
    return [toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: answer.map((s) => s.value[0] * 1000) },
        ...labels.map((l) => ({ name: l, type: FieldType.string, values: answer.map((s) => s.metric[l]) })),
        { name: 'Value', type: FieldType.number, values: answer.map((s) => Number(s.value[1])) },
      ],
    })];
  }
  return answer.map((series) => toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: series.values.map((v: any) => v[0] * 1000) },
      {
        name: 'Value', type: FieldType.number, labels: series.metric, values: series.values.map((v: any) => Number(v[1])),
        config: { displayNameFromDS: renderLegendFormat(target.legendFormat, series.metric) },
      },
    ],
  }));
}

async function prepared(panel: any): Promise<DataFrame[]> {
  let data: DataFrame[] = panel.targets.flatMap((target: any, i: number) => frames(target, panel.answers[i]));
  if (panel.transformations?.length) {
    data = await firstValueFrom(transformDataFrame(panel.transformations, data));
  }
  const done = applyFieldOverrides({
    data, theme, timeZone: 'utc', replaceVariables: plain, fieldConfigRegistry: registry,
    fieldConfig: { overrides: [], ...panel.fieldConfig },
  } as any);
  cacheFieldDisplayNames(done); // as core does, and tables rely on
  return done;
}

const range = (board: any): any => {
  const [from, to] = [dateTime(board.from * 1000), dateTime(board.to * 1000)];
  return { from, to, raw: { from, to } };
};

function Stat({ panel, data, width, height }: any) {
  const values = () => getFieldDisplayValues({
    data, theme, fieldConfig: { overrides: [], ...panel.fieldConfig }, reduceOptions: panel.options.reduceOptions,
    replaceVariables: plain, timeZone: 'utc',
  } as any);
  const one = ({ value, width, height, count }: any) => (
    <BigValue theme={theme} width={width} height={height} value={value.display} count={count}
      colorMode={panel.options.colorMode} graphMode="none" justifyMode="auto" textMode={panel.options.textMode} />);
  return <VizRepeater width={width} height={height} source={data} getValues={values} renderValue={one} orientation="auto" itemSpacing={4} />;
}

function Timeline({ board, data, width, height }: any) {
  const name = Math.min(260, width * 0.4), line = Math.min(26, (height - 18) / Math.max(1, data.length));
  const x = (ms: number) => name + ((ms / 1000 - board.from) / (board.to - board.from)) * (width - name);
  const rows = data.map((frame: DataFrame, row: number) => {
    const [time, field]: Field[] = frame.fields as any;
    const parts: React.ReactNode[] = [];
    for (let i = 0, start = 0; i < frame.length; i++) {
      const last = i + 1 === frame.length, hole = !last && time.values[i + 1] - time.values[i] > 3000;
      if (last || hole || field.values[i + 1] !== field.values[i]) {
        const end = last ? time.values[i] : hole ? time.values[i] + 1000 : time.values[i + 1];
        const shown = field.display!(field.values[i]);
        parts.push(<div key={i} title={formattedValueToString(shown)} style={{
          position: 'absolute', left: x(time.values[start]), width: Math.max(1, x(end) - x(time.values[start])),
          top: row * line + 1, height: line - 3, background: shown.color, opacity: 0.75,
        }} />);
        start = i + 1;
      }
    }
    const label = <div key="name" style={{
      position: 'absolute', top: row * line, height: line, lineHeight: `${line}px`, width: name - 6, left: 0, fontSize: Math.min(12, line - 1),
      overflow: 'hidden', whiteSpace: 'nowrap', textOverflow: 'ellipsis', textAlign: 'right',
    }}>{field.config.displayNameFromDS}</div>;
    return [label, ...parts];
  });
  const known = new Map<string, string>();
  for (const mapping of data[0]?.fields[1].config.mappings ?? []) {
    Object.values<any>(mapping.options).forEach((one) => known.set(one.text, theme.visualization.getColorByName(one.color)));
  }
  const legend = [...known].map(([text, color]) => (
    <span key={text} style={{ marginRight: 12 }}><span style={{ display: 'inline-block', width: 12, height: 4, margin: '0 4px 3px 0', background: color }} />{text}</span>));
  return <div style={{ position: 'relative', width, height }}>{rows}
    <div style={{ position: 'absolute', bottom: 0, left: name, fontSize: 12 }}>{legend}</div></div>;
}

function Content({ board, panel, data, width, height }: any) {
  if (panel.type !== 'stat' && !data.some((frame: DataFrame) => frame.length)) {
    return <div style={{ height, display: 'grid', placeItems: 'center', color: theme.colors.text.secondary }}>No data</div>;
  }
  switch (panel.type) {
    case 'stat': return <Stat panel={panel} data={data} width={width} height={height} />;
    case 'table': return <TableNG data={data[0]} width={width} height={height} {...({ structureRev: 1 } as any)} />;
    case 'state-timeline': return <Timeline board={board} data={data} width={width} height={height} />;
    default: return <TimeSeries frames={data} width={width} height={height} timeRange={range(board)} timeZone="utc"
      legend={panel.options.legend} options={panel.options} />;
  }
}

class Guard extends React.Component<any, any> {
  state = { text: '' };
  static getDerivedStateFromError(error: any) { return { text: String(error?.stack ?? error) }; }
  componentDidCatch(error: any) { failures.push(`${this.props.title}: ${error}`); }
  render() { return this.state.text ? <pre style={{ color: 'red' }}>{this.state.text}</pre> : this.props.children; }
}

function Panel({ board, panel }: any) {
  const [data, setData] = useState<DataFrame[] | null>(null);
  useEffect(() => { prepared(panel).then(setData, (error) => failures.push(`${panel.title}: ${error}`)); }, []);
  const { x, y, w, h } = panel.gridPos;
  return <div style={{ position: 'absolute', left: x * COLUMN, top: y * UNIT }}>
    <PanelChrome width={w * COLUMN - GAP} height={h * UNIT - GAP} title={panel.title} description={panel.description}>
      {(width: number, height: number) => data && (
        <Guard title={panel.title}><Content board={board} panel={panel} data={data} width={width} height={height} /></Guard>)}
    </PanelChrome></div>;
}

function Heading({ panel }: any) {
  return <div style={{ position: 'absolute', left: 4, top: panel.gridPos.y * UNIT + 6, fontSize: 16, fontWeight: 500 }}>{panel.title}</div>;
}

(async () => {
  const board = await (await fetch('/board.json')).json();
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}><GlobalStyles /><div style={{ position: 'relative', color: theme.colors.text.primary }}>
      {board.panels.map((p: any) => (p.type === 'row' ? <Heading key={p.id} panel={p} /> : <Panel key={p.id} board={board} panel={p} />))}
    </div></ThemeContext.Provider>);
  setTimeout(() => console.log(`DRAWN ${board.title}: ${document.querySelectorAll('.uplot').length} graphs, failures ${JSON.stringify(failures)}`), 5000);
})();
